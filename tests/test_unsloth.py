"""Tests of volta_fa.enable_unsloth, which replaces functions of the training library unsloth by volta_fa's attention: results, calls that
fall back to unsloth's function, and refused releases.

unsloth has three attention functions: a dispatcher for most models, one for Gemma 3 (gqa_sdpa: grouped heads), one with sinks for gpt-oss
(flex). The fixture `installed` installs fake modules with their names and signatures, whose functions raise AssertionError; `unsloth` also
enables volta_fa. unsloth_stats() counts calls that volta_fa `ran`, `traced` into a compiled graph, or that `fell_back`, by reason.
tools/programs/run_unsloth.py trains with the real packages, and the last test checks their names, if installed."""

import dataclasses
import functools
import sys
import types
import warnings

import pytest
import torch
import torch.nn.functional as F

import volta_fa
from flash_attention import refused  # checks that a call raises this error, with a message of one line
from volta_fa.integrations.devices import Devices
from volta_fa.integrations.unsloth import dispatch, gqa_sdpa, releases, sinks, switch

#: WINDOW: keys that a query sees, its own included.
BATCH, SEQLEN, HEADS, KV_HEADS, HEADDIM, WINDOW = 2, 12, 4, 2, 8, 5
#: Of results in fp64.
TOLERANCE = {"rtol": 0, "atol": 1e-12}
GROUPS = HEADS // KV_HEADS  # query heads per KV head


def dataclass(name, fields):
    """Returns a dataclass with these fields, of any type."""
    return dataclasses.make_dataclass(name, [(field, object, None) for field in sorted(fields)])


def refuse_to_run(*_args, **_kwargs):
    raise AssertionError("unsloth's own function ran")


def falls_back(call, *arguments, **options):
    """Checks that a call runs unsloth's own function."""
    refused(AssertionError, "unsloth's own function ran", call, *arguments, **options)


@pytest.fixture
def installed(monkeypatch):
    """Installs modules with the names, signatures and fields that this release of volta_fa knows. Their functions raise AssertionError."""

    def module(name, **attributes):
        made = types.ModuleType(name)
        vars(made).update(attributes)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    def _run_attention(*, config, context, Q, K, V):
        refuse_to_run()

    def make_gqa_sdpa(scaled_dot_product_attention):
        def theirs(query, key, value, attn_mask, dropout_p, is_causal, scale, groups):
            refuse_to_run()

        return theirs

    def flex_attention_with_sink(
        self_attn, query, key, value, attention_mask=None, scale=None, sliding_window=None, compile=True, has_static_cache=True
    ):
        refuse_to_run()

    for name in ("unsloth", "unsloth.utils", "unsloth.models", "unsloth_zoo", "unsloth_zoo.temporary_patches", gqa_sdpa._FLOAT32_MODULE):
        module(name)
    made = types.SimpleNamespace(
        dispatch=module(
            dispatch.MODULE, _run_attention=_run_attention, AttentionConfig=dataclass("AttentionConfig", dispatch._CONFIG),
            AttentionContext=dataclass("AttentionContext", dispatch._CONTEXT),
            cover_padded_cu_seqlens=lambda seq_info, total_tokens: seq_info[1:], _ring_attention_active=lambda: False,
        ),
        gemma2=module("unsloth.models.gemma2", HAS_FLASH_ATTENTION_SOFTCAPPING=False),
        llama=module("unsloth.models.llama", HAS_FLASH_ATTENTION_SOFTCAPPING=False),
        gqa_sdpa=module(gqa_sdpa.MODULE, make_gqa_sdpa=make_gqa_sdpa),
        flex=module(sinks.MODULE, flex_attention_with_sink=flex_attention_with_sink, HAS_FLEX_ATTENTION=True),
    )  # fmt: skip
    monkeypatch.setattr(releases, "version", lambda package: "2026.10.9")
    volta_fa.unsloth_stats(reset=True)
    yield made
    volta_fa.disable_unsloth()


@pytest.fixture
def unsloth(installed):
    """Returns the modules of `installed` after volta_fa replaced their functions."""
    volta_fa.enable_unsloth("cpu")
    return installed


def operands(dtype=torch.float64, headdim=HEADDIM, batch=BATCH):
    """Returns q, k and v, (batch, heads, SEQLEN, headdim)."""
    torch.manual_seed(0)
    shapes = [(batch, heads, SEQLEN, headdim) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def visible(window=None, segments=None):
    """Returns (SEQLEN, SEQLEN) bool: which keys each query sees, causal, within a window and its segment of packed sequences."""
    distance = torch.arange(SEQLEN)[:, None] - torch.arange(SEQLEN)
    seen = (distance >= 0) & (distance < (window or SEQLEN))
    return seen if segments is None else seen & (segments[:, None] == segments)


def sdpa(q, k, v, seen, scale=None):
    """Returns the expected out, (batch, heads, seqlen, headdim). `seen`: bool, which keys each query sees."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)


def call(unsloth, q, k, v, arguments, sdpa_kwargs=None, **context):
    """Returns out (batch, SEQLEN, heads, headdim) of unsloth's dispatcher. `arguments` are flash-attn's, `context` is for SDPA too."""
    fields = dict(seq_info=None, attention_mask=None, prefix_seg_info=None, causal_mask=None, is_causal=True) | context
    name = "flash_varlen_kwargs" if fields["seq_info"] is not None else "flash_dense_kwargs"
    config = unsloth.dispatch.AttentionConfig(**{name: arguments, "sdpa_kwargs": sdpa_kwargs})
    return unsloth.dispatch._run_attention(config=config, context=unsloth.dispatch.AttentionContext(**fields), Q=q, K=k, V=v)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("packed", [False, True])
def test_dispatcher(unsloth, packed, window):
    """Dense and packed calls, with and without a window, give SDPA's results and gradients. flash-attn's window excludes the query."""
    q, k, v = operands(batch=1 if packed else BATCH)
    arguments = {"causal": True, "softmax_scale": None, "window_size": (-1, -1) if window is None else (window - 1, window - 1)}
    context, segments = {"sliding_window": window}, None
    if packed:
        # lengths (not read), cu_seqlens, max_seqlen
        context["seq_info"] = (None, torch.tensor([0, 7, SEQLEN], dtype=torch.int32), 7)
        segments = torch.tensor([0] * 7 + [1] * (SEQLEN - 7))
    out = call(unsloth, q, k, v, arguments, **context)
    truth = sdpa(q, k, v, visible(window, segments)).transpose(1, 2)
    torch.testing.assert_close(out, truth, **TOLERANCE)
    dout = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(truth, (q, k, v), dout), **TOLERANCE)
    assert volta_fa.unsloth_stats() == {"ran": 1, "traced": 0, "fell_back": {}}


def test_softcap_of_gemma2(installed):
    assert not installed.gemma2.HAS_FLASH_ATTENTION_SOFTCAPPING
    volta_fa.enable_unsloth("cpu")
    assert installed.gemma2.HAS_FLASH_ATTENTION_SOFTCAPPING
    q, k, v = operands()
    out = call(installed, q, k, v, {"causal": True, "softcap": 1.5, "softmax_scale": 0.5}, causal_mask=True)
    scores = 1.5 * torch.tanh(0.5 * q @ k.repeat_interleave(GROUPS, 1).mT / 1.5)
    truth = scores.masked_fill(~visible(), float("-inf")).softmax(-1) @ v.repeat_interleave(GROUPS, 1)
    torch.testing.assert_close(out, truth.transpose(1, 2), **TOLERANCE)


@pytest.mark.parametrize("kind", ["none", "causal", "bool window", "float window", "padding"])
def test_attention_of_gemma3(unsloth, kind):
    attention = unsloth.gqa_sdpa.make_gqa_sdpa(F.scaled_dot_product_attention)
    q, k, v = operands()
    seen = {"none": torch.ones(SEQLEN, SEQLEN, dtype=torch.bool), "causal": visible()}.get(kind, visible(WINDOW)).expand(BATCH, 1, -1, -1)
    mask = None
    if kind.endswith("window"):
        mask = seen.clone() if kind == "bool window" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        assert gqa_sdpa.causal_window(mask) == WINDOW - 1
    elif kind == "padding":
        seen = seen.clone()
        seen[1, :, :, SEQLEN - 3 :] = False
        mask = seen
        assert gqa_sdpa.causal_window(mask) is None
    out = attention(q, k, v, mask, 0.0, kind == "causal", 0.3, GROUPS)
    torch.testing.assert_close(out, sdpa(q, k, v, seen, 0.3), **TOLERANCE)
    assert volta_fa.unsloth_stats()["ran"] == 1


def test_causal_window_notices_in_place_changes():
    """causal_window() recognizes a mask as a causal window (-1: no limit) and remembers it, but not after an in-place change."""
    mask = visible(WINDOW)[None, None].clone()
    assert gqa_sdpa.causal_window(mask) == WINDOW - 1
    mask[..., SEQLEN // 2, 0] = True
    assert gqa_sdpa.causal_window(mask) is None
    assert gqa_sdpa.causal_window(visible()[None, None].clone()) == -1
    assert gqa_sdpa.causal_window(torch.where(visible(WINDOW), 0.0, -3.0)[None, None]) is None  # a bias, not a mask
    assert gqa_sdpa.causal_window(torch.zeros(BATCH, 1, 0, 0)) is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_hides_everything_is_not_causal(unsloth, dtype):
    """A call with a mask that hides everything gives 0, where a causal one would give attention."""
    hidden = torch.zeros(1, 1, SEQLEN, SEQLEN, dtype=torch.bool)
    mask = hidden if dtype == torch.bool else torch.full(hidden.shape, float("-inf"))
    assert gqa_sdpa.causal_window(mask) is None
    attention = unsloth.gqa_sdpa.make_gqa_sdpa(F.scaled_dot_product_attention)
    assert not attention(*operands(), mask, 0.0, False, None, GROUPS).any()


def test_qwen3_moe_keeps_float32(unsloth):
    """A caller in unsloth's module for Qwen3-MoE, which keeps q, k and v in float32, gets unsloth's own attention."""
    module = vars(sys.modules[gqa_sdpa._FLOAT32_MODULE])
    exec("def patch(make, *a):\n    return make(*a)\n", module)
    attention = module["patch"](unsloth.gqa_sdpa.make_gqa_sdpa, F.scaled_dot_product_attention)
    falls_back(attention, *operands(), None, 0.0, True, None, GROUPS)
    assert volta_fa.unsloth_stats() == {"ran": 0, "traced": 0, "fell_back": {"float32": 1}}


@pytest.mark.parametrize("window", [None, WINDOW])
def test_sinks_of_gpt_oss(unsloth, window):
    q, k, v = operands()
    sink = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    layer = types.SimpleNamespace(sinks=sink, scaling=0.4, sliding_window=window, training=True)
    out = unsloth.flex.flex_attention_with_sink(layer, q, k, v)
    scores = (0.4 * q @ k.repeat_interleave(GROUPS, 1).mT).masked_fill(~visible(window), float("-inf"))
    scores = torch.cat((scores, sink[None, :, None, None].expand(BATCH, -1, SEQLEN, 1)), -1)
    truth = (scores.softmax(-1)[..., :-1] @ v.repeat_interleave(GROUPS, 1)).transpose(1, 2)
    torch.testing.assert_close(out, truth, **TOLERANCE)
    dout = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, (q, sink), dout), torch.autograd.grad(truth, (q, sink), dout), **TOLERANCE)


CAUSAL = {"causal": True}
WINDOWED = {"causal": True, "window_size": (WINDOW - 1, WINDOW - 1)}
#: Reason in unsloth_stats(), and arguments and context of a call.
FALLBACKS = [
    ("attention_mask", CAUSAL, {"attention_mask": torch.ones(BATCH, SEQLEN)}),
    ("prefix", CAUSAL, {"prefix_seg_info": object()}),
    ("causal_mask", CAUSAL, {"causal_mask": object()}),
    ("headdim", CAUSAL, {}),
    # unsloth's SDPA reads the context, and flash-attn the arguments: a call in which they differ is ambiguous
    ("arguments", CAUSAL, {"sliding_window": WINDOW}),
    ("arguments", WINDOWED, {}),
    ("arguments", WINDOWED, {"sliding_window": WINDOW + 1}),
    ("arguments", WINDOWED, {"sliding_window": WINDOW, "is_causal": False}),
    ("arguments", CAUSAL, {"sdpa_kwargs": {"scale": 0.9}}),
    ("arguments", {"causal": True, "softmax_scale": 0.9}, {}),
    ("arguments", CAUSAL, {"sdpa_kwargs": {"dropout_p": 0.1}}),
    ("attention_mask", CAUSAL, {"sdpa_kwargs": {"attn_mask": visible()}}),
]


@pytest.mark.parametrize("reason, arguments, context", FALLBACKS)
def test_other_calls_fall_back_and_are_counted(unsloth, reason, arguments, context):
    falls_back(call, unsloth, *operands(headdim=520 if reason == "headdim" else HEADDIM), arguments, **context)
    assert volta_fa.unsloth_stats() == {"ran": 0, "traced": 0, "fell_back": {reason: 1}}


#: Reason in unsloth_stats(), a change of q, and attn_mask, dropout_p, is_causal, scale and groups of a call.
GEMMA_FALLBACKS = [
    ("headdim", lambda q: q.expand(-1, -1, -1, 520), (None, 0.0, True, None, GROUPS)),
    ("shape", lambda q: q[:, :, -3:], (None, 0.0, True, None, GROUPS)),
    ("shape", lambda q: q, (None, 0.0, False, None, GROUPS + 1)),
    ("attention_mask", lambda q: q, (visible()[None, None], 0.0, True, None, GROUPS)),  # a mask with is_causal
    ("attention_mask", lambda q: q, (visible(), 0.0, False, None, GROUPS)),  # two dimensions
    ("attention_mask", lambda q: q[:, :, -3:], (visible()[None, None], 0.0, False, None, GROUPS)),  # a mask of other queries
]


@pytest.mark.parametrize("reason, change, arguments", GEMMA_FALLBACKS)
def test_calls_of_gemma_that_fall_back(unsloth, reason, change, arguments):
    attention = unsloth.gqa_sdpa.make_gqa_sdpa(F.scaled_dot_product_attention)
    q, k, v = operands(headdim=1)
    falls_back(attention, change(q), k.expand(-1, -1, -1, 520) if reason == "headdim" else k, v, *arguments)
    assert volta_fa.unsloth_stats() == {"ran": 0, "traced": 0, "fell_back": {reason: 1}}


#: Reason, the first of the last query positions that a call has, attention_mask, whether the layer has sinks.
SINK_FALLBACKS = [("shape", -3, None, True), ("attention_mask", 0, visible()[None, None], True), ("arguments", 0, None, False)]


@pytest.mark.parametrize("reason, first, mask, has_sinks", SINK_FALLBACKS)
def test_calls_of_gpt_oss_that_fall_back(unsloth, reason, first, mask, has_sinks):
    q, k, v = operands()
    layer = types.SimpleNamespace(sinks=torch.zeros(HEADS, dtype=torch.float64) if has_sinks else None)
    falls_back(unsloth.flex.flex_attention_with_sink, layer, q[:, :, first:], k, v, mask)
    assert volta_fa.unsloth_stats() == {"ran": 0, "traced": 0, "fell_back": {reason: 1}}


def test_arguments_that_equal_the_context_run(unsloth):
    scale = {"causal": True, "softmax_scale": 0.9, "window_size": (SEQLEN, SEQLEN)}
    q, k, v = operands()
    truth = sdpa(q, k, v, visible(), 0.9).transpose(1, 2)
    out = call(unsloth, q, k, v, scale, sdpa_kwargs={"scale": 0.9, "attn_mask": None}, sliding_window=SEQLEN)
    torch.testing.assert_close(out, truth, **TOLERANCE)
    call(unsloth, q[:, :, -1:], k, v, CAUSAL)  # decoding
    falls_back(call, unsloth, q[:, :, -3:], k, v, CAUSAL)
    assert volta_fa.unsloth_stats() == {"ran": 2, "traced": 0, "fell_back": {"shape": 1}}


def test_a_softcap_without_a_kernel_raises(unsloth):
    with pytest.raises(NotImplementedError, match="softcap: got it with a call that has no kernel"):
        call(unsloth, *operands(), {"causal": True, "softcap": 2.0}, attention_mask=torch.ones(BATCH, SEQLEN))


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_a_graph_break(unsloth, packed):
    """unsloth compiles the layers of some models. Counts must not compile them again."""
    lengths = (None, torch.tensor([0, 7, SEQLEN], dtype=torch.int32), 7) if packed else None
    q, k, v = operands(batch=1)
    attend = torch.compile(lambda *qkv: call(unsloth, *qkv, CAUSAL, seq_info=lengths), backend="eager", fullgraph=True)
    truth = call(unsloth, q, k, v, CAUSAL, seq_info=lengths)
    for _ in range(3):
        torch.testing.assert_close(attend(q, k, v), truth, **TOLERANCE)
    assert volta_fa.unsloth_stats() == {"ran": 1, "traced": 1, "fell_back": {}}


def test_disable_restores_unsloth_and_its_loaded_models(installed):
    before = installed.dispatch._run_attention
    volta_fa.enable_unsloth("cpu")
    volta_fa.enable_unsloth("cpu")
    loaded = installed.gqa_sdpa.make_gqa_sdpa(F.scaled_dot_product_attention)
    sink = installed.flex.flex_attention_with_sink
    volta_fa.disable_unsloth()
    assert installed.dispatch._run_attention is before
    assert not installed.gemma2.HAS_FLASH_ATTENTION_SOFTCAPPING
    falls_back(loaded, *operands(), None, 0.0, True, None, GROUPS)
    falls_back(sink, None, *operands())


def test_a_second_enable_replaces_the_devices_of_loaded_models(installed, monkeypatch):
    monkeypatch.setattr(switch, "devices_of", lambda op, device, force: Devices(cpu=device == "cpu", cuda=frozenset()))
    volta_fa.enable_unsloth()
    loaded = installed.gqa_sdpa.make_gqa_sdpa(F.scaled_dot_product_attention)
    sink = installed.flex.flex_attention_with_sink
    volta_fa.enable_unsloth("cpu")
    loaded(*operands(), None, 0.0, True, None, GROUPS)
    sink(types.SimpleNamespace(sinks=torch.zeros(HEADS, dtype=torch.float64)), *operands())
    assert volta_fa.unsloth_stats() == {"ran": 2, "traced": 0, "fell_back": {}}


def test_a_wrapper_around_volta_fa_stays(installed):
    before = installed.dispatch._run_attention
    volta_fa.enable_unsloth("cpu")
    inner = installed.dispatch._run_attention

    @functools.wraps(inner)
    def wrapper(**arguments):
        return inner(**arguments)

    installed.dispatch._run_attention = wrapper
    volta_fa.disable_unsloth()
    assert installed.dispatch._run_attention is wrapper
    falls_back(call, installed, *operands(), CAUSAL)
    assert volta_fa.unsloth_stats() == {"ran": 0, "traced": 0, "fell_back": {}}
    volta_fa.enable_unsloth("cpu")
    call(installed, *operands(), CAUSAL)
    falls_back(call, installed, *operands(), CAUSAL, causal_mask=object())  # without recursion
    assert volta_fa.unsloth_stats()["ran"] == 1
    volta_fa.disable_unsloth()
    assert installed.dispatch._run_attention is wrapper
    installed.dispatch._run_attention = before


#: Functions and fields of a release that volta_fa does not know.
CHANGES = {
    "unsloth.utils.attention_dispatch._run_attention": lambda m: setattr(m.dispatch, "_run_attention", lambda q, k, v: None),
    "unsloth.utils.attention_dispatch.AttentionContext": lambda m: setattr(
        m.dispatch, "AttentionContext", dataclass("AttentionContext", dispatch._CONTEXT | {"new"})
    ),
    "unsloth.models.gemma2.HAS_FLASH_ATTENTION_SOFTCAPPING": lambda m: delattr(m.gemma2, "HAS_FLASH_ATTENTION_SOFTCAPPING"),
    "unsloth_zoo.temporary_patches.sdpa_gqa.make_gqa_sdpa": lambda m: delattr(m.gqa_sdpa, "make_gqa_sdpa"),
    "unsloth_zoo.flex_attention.flex_attention_with_sink": lambda m: setattr(m.flex, "flex_attention_with_sink", lambda *a: None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_refuses_a_changed_unsloth_and_replaces_nothing(installed, name, monkeypatch):
    CHANGES[name](installed)
    monkeypatch.setattr(releases, "version", lambda package: "2099.1.1")
    before = installed.dispatch._run_attention
    with pytest.raises(ImportError) as caught:
        volta_fa.enable_unsloth("cpu")
    message = str(caught.value)
    assert name in message and "2099.1.1" in message and releases.TESTED[0] in message
    assert installed.dispatch._run_attention is before


def test_warns_about_an_untested_release(installed, monkeypatch):
    monkeypatch.setattr(releases, "version", lambda package: "2099.1.1")
    with pytest.warns(UserWarning, match="2099.1.1"):
        volta_fa.enable_unsloth("cpu")


def test_without_unsloth_or_a_gpu(installed, monkeypatch):
    if not torch.cuda.is_available():
        refused(RuntimeError, 'device="cpu"', volta_fa.enable_unsloth)
    monkeypatch.delitem(sys.modules, "unsloth")
    refused(ImportError, "import unsloth", volta_fa.enable_unsloth, "cpu")


def test_the_installed_release_is_known(monkeypatch):
    """The real modules have the names and signatures of the fake ones."""
    monkeypatch.setenv("UNSLOTH_ALLOW_CPU", "1")
    pytest.importorskip("unsloth", reason="unsloth is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        volta_fa.enable_unsloth("cpu")
    volta_fa.disable_unsloth()
