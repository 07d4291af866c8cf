"""volta_fa.integrations.flash_attn: flash-attn's cross entropy, norms and attention modules, in plain PyTorch, against PyTorch in fp64.

Programs import them through the flash-attn shim (test_flash_attn_shim.py). They need no kernel of volta_fa but attention."""

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from flash_attention import refused, signature_of  # refused: checks an error. signature_of: arguments and defaults as text
from processes import end_rank
from volta_fa.integrations.flash_attn import cross_entropy, mha, norms
from volta_fa.integrations.flash_attn.cross_entropy import CrossEntropyLoss, cross_entropy_loss
from volta_fa.integrations.flash_attn.mha import MHA
from volta_fa.rotary import RotaryEmbedding

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)


def close(found, expected):
    """Compares, in fp16 within two roundings, since modules compute in fp32 or wider; in fp32 within about 170, in fp64 within 1e-10."""
    rtol = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-3}[found.dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=rtol, atol=rtol)


def gradients(result, leaves, seed=1):
    """The gradients of a random function of the result, the same for each dtype."""
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.autograd.grad(result, leaves, gradient.to(result.dtype), retain_graph=True)


def draw(*shape, dtype=torch.float64):
    """Returns a random tensor that requires a gradient, of the same numbers in each dtype."""
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# The arguments with which norms begin, and those of the fused norms and of flash-attn's references.
BEGIN = "(x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, rowscale=None, prenorm=False, "
NORM = (
    BEGIN + "residual_in_fp32=False, zero_centered_weight=False, {}return_dropout_mask=False, out_dtype=None, out=None, residual_out=None)"
)
REFERENCE = BEGIN + "zero_centered_weight=False, dropout_mask=None, dropout_mask1=None, upcast=False)"
SIGNATURES = {
    cross_entropy_loss: (
        "(logits, labels, precomputed_lse=None, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, ignore_index=-100, "
        "inplace_backward=False, process_group=None)"
    ),
    CrossEntropyLoss: (
        "(ignore_index=-100, reduction='mean', label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, inplace_backward=False, "
        "process_group=None, return_z_loss=False)"
    ),
    norms.layer_norm_fn: NORM.format("is_rms_norm=False, "),
    norms.rms_norm_fn: NORM.format(""),
    norms.layer_norm_linear_fn: (
        "(x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, eps=1e-06, prenorm=False, residual_in_fp32=False, "
        "is_rms_norm=False)"
    ),
    norms.layer_norm_ref: REFERENCE.replace("upcast=False)", "upcast=False, *, is_rms_norm=False)"),
    norms.rms_norm_ref: REFERENCE,
    norms.RMSNorm: "(hidden_size, eps=1e-05, dropout_p=0.0, zero_centered_weight=False, device=None, dtype=None)",
    norms.rms_norm: "(x, weight, epsilon)",
    norms.dropout_add_rms_norm: (
        "(x0, residual, weight, bias, dropout_p, epsilon, rowscale=None, layerscale=None, prenorm=False, residual_in_fp32=False, "
        "return_dropout_mask=False)"
    ),
    mha.FlashSelfAttention: (
        "(causal=False, softmax_scale=None, attention_dropout=0.0, window_size=(-1, -1), alibi_slopes=None, deterministic=False)"
    ),
    mha.FlashCrossAttention: (
        "(causal=False, softmax_scale=None, attention_dropout=0.0, alibi_slopes=None, window_size=(-1, -1), deterministic=False)"
    ),
    mha.SelfAttention: "(causal=False, softmax_scale=None, attention_dropout=0.0)",
    mha.CrossAttention: "(causal=False, softmax_scale=None, attention_dropout=0.0)",
    MHA: (
        "(embed_dim, num_heads, num_heads_kv=None, cross_attn=False, qkv_proj_bias=True, out_proj_bias=True, dropout=0.0, "
        "softmax_scale=None, causal=False, layer_idx=None, dwconv=False, rotary_emb_dim=0, rotary_emb_base=10000.0, "
        "rotary_emb_scale_base=None, rotary_emb_interleaved=False, use_alibi=False, window_size=(-1, -1), fused_bias_fc=False, "
        "use_flash_attn=False, return_residual=False, checkpointing=False, device=None, dtype=None)"
    ),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_signatures_are_flash_attns(function):
    assert signature_of(function) == SIGNATURES[function]


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"logit_scale": 0.7, "lse_square_scale": 1e-2, "label_smoothing": 0.2}], ids=str
)
@DTYPES
def test_cross_entropy(dtype, options, monkeypatch):
    """Losses, z-losses (lse_square_scale * logsumexp^2, which losses include) and the gradient of logits."""
    monkeypatch.setattr(cross_entropy, "_CHUNK", 60)  # logits at once: 3 rows of 19
    logits, labels = draw(7, 19, dtype=dtype), torch.tensor([3, 0, 18, -100, 5, 5, 1])
    losses, z_losses = cross_entropy_loss(logits, labels, **options)
    wide = logits.detach().double().requires_grad_()
    x = wide * options.get("logit_scale", 1.0)
    lse, ignored = x.logsumexp(-1), labels == -100
    z = (options.get("lse_square_scale", 0.0) * lse.square()).masked_fill(ignored, 0.0)
    right = functional.cross_entropy(x, labels, reduction="none", label_smoothing=options.get("label_smoothing", 0.0)) + z
    assert losses.dtype == torch.promote_types(dtype, torch.float32) and not z_losses.requires_grad
    close(losses, right)
    close(z_losses, z)
    (found,), (want,) = gradients(losses, logits), gradients(right, wide)
    assert found.dtype == dtype
    close(found, want)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_module(reduction, inplace):
    logits, labels = draw(6, 11), torch.tensor([1, -1, 10, 0, 3, -1])
    values = (logits * 2).detach().requires_grad_()
    right = functional.cross_entropy(values, labels, ignore_index=-1, reduction=reduction)
    scaled = logits * 2  # not a leaf, which the gradient may overwrite
    loss, z_loss = CrossEntropyLoss(-1, reduction, inplace_backward=inplace, return_z_loss=True)(scaled, labels)
    close(loss, right)
    assert z_loss.shape == loss.shape and not z_loss.any()
    (want,) = gradients(right, values)
    (found,) = gradients(loss, logits)
    close(found, want * 2)
    assert inplace == torch.allclose(scaled, want)


def test_cross_entropy_with_the_logsumexp():
    """A given logsumexp is used, unless logits are scaled."""
    logits, labels = draw(6, 11), torch.arange(6)
    lse = logits.detach().logsumexp(-1)
    close(cross_entropy_loss(logits, labels, lse)[0], functional.cross_entropy(logits, labels, reduction="none"))
    assert not torch.allclose(cross_entropy_loss(logits, labels, lse + 1)[0], cross_entropy_loss(logits, labels)[0])
    assert torch.equal(*(cross_entropy_loss(logits, labels, given, logit_scale=2.0)[0] for given in (lse + 1, None)))


def test_cross_entropy_compiles_with_symbolic_sizes():
    """Gradients are right in compiled programs, and new numbers of rows compile nothing."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(cross_entropy_loss, backend=counter, fullgraph=True)
    for rows in (7, 9, 12, 15):
        logits, labels = draw(rows, 19), torch.arange(rows)
        options = {"label_smoothing": 0.1, "lse_square_scale": 0.1}
        found, expected = compiled(logits, labels, **options), cross_entropy_loss(logits, labels, **options)
        torch.testing.assert_close(found, expected)
        weights = torch.randn(rows, dtype=torch.float64)
        got, want = (torch.autograd.grad(losses, logits, weights) for losses, _ in (found, expected))
        torch.testing.assert_close(got, want)
    assert counter.frame_count == 2, "one with static sizes, one with symbolic ones"
    torch.compiler.reset()


def rank_of_cross_entropy(rank, address):
    """Runs in each of two processes, which have half of the vocabulary's logits."""
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    torch.manual_seed(0)
    logits, labels = draw(5, 12), torch.tensor([0, 5, 6, 11, -100])
    local = logits.detach()[:, rank * 6 : rank * 6 + 6].clone().requires_grad_()
    losses, z = cross_entropy_loss(local, labels, label_smoothing=0.1, lse_square_scale=0.01, process_group=torch.distributed.group.WORLD)
    right, right_z = cross_entropy_loss(logits, labels, label_smoothing=0.1, lse_square_scale=0.01)
    close(losses, right)
    close(z, right_z)
    close(gradients(losses, local)[0], gradients(right, logits)[0][:, rank * 6 : rank * 6 + 6])
    torch.distributed.destroy_process_group()
    end_rank()  # without finalizing the interpreter, which may abort after gloo


@pytest.mark.slow
def test_cross_entropy_of_a_split_vocabulary(tmp_path):
    torch.multiprocessing.spawn(rank_of_cross_entropy, (f"file://{tmp_path}/store",), nprocs=2)


def test_cross_entropy_errors():
    logits, labels = draw(2, 3), torch.tensor([0, 3])
    assert cross_entropy_loss(logits, labels)[0].isnan().tolist() == [False, True], "an impossible label"
    refused(ValueError, r"labels: got shape \(1,\), expected shape \(2,\)", cross_entropy_loss, logits, labels[:1])
    refused(ValueError, r"labels: got dtype torch.float32, expected an integer", cross_entropy_loss, logits, labels.float())
    refused(ValueError, r"logits: got dtype torch.int64, expected a floating", cross_entropy_loss, logits.long(), labels)
    refused(ValueError, r"logits: got shape \(1, 2, 3\)", cross_entropy_loss, logits[None], labels)
    refused(ValueError, r"logit_scale: got 0", cross_entropy_loss, logits, labels, logit_scale=0)
    refused(NotImplementedError, r"reduction: got 'max'", CrossEntropyLoss, reduction="max")


@pytest.mark.parametrize("is_rms_norm", [False, True])
@pytest.mark.parametrize("zero_centered_weight", [False, True])
@DTYPES
def test_norms(dtype, zero_centered_weight, is_rms_norm):
    """Functions return two norms, y and y1, of the sum of x, x1 and residual, and the sum. Checks them and their gradients."""
    x, x1, residual = (draw(2, 5, 24, dtype=dtype) for _ in range(3))
    weight, bias, weight1, bias1 = parameters = [draw(24) for _ in range(4)]
    leaves = [x, x1, residual, *parameters]
    function = norms.rms_norm_fn if is_rms_norm else norms.layer_norm_fn
    options = {"eps": 1e-3, "prenorm": True, "zero_centered_weight": zero_centered_weight}
    y, y1, total = function(x, weight, bias, residual, x1, weight1, bias1, **options)
    assert y.dtype == y1.dtype == total.dtype == dtype
    wide = [t.detach().double().requires_grad_() for t in leaves]
    right_total = wide[0] + wide[1] + wide[2]

    def norm(weight, bias):
        weight = weight + 1 if zero_centered_weight else weight
        if is_rms_norm:
            return functional.rms_norm(right_total, (24,), weight, 1e-3) + bias
        return functional.layer_norm(right_total, (24,), weight, bias, 1e-3)

    loose = 2e-2 if dtype == torch.float16 else 1e-4  # gradients of weights add up ten rows
    # each result, its exact value, and the indices of its weight and bias among the leaves
    for found, want, own in ((y, norm(*wide[3:5]), [3, 4]), (y1, norm(*wide[5:7]), [5, 6]), (total, right_total, [])):
        close(found, want)
        used = [0, 1, 2, *own]
        for f, w in zip(gradients(found, [leaves[i] for i in used]), gradients(want, [wide[i] for i in used])):
            torch.testing.assert_close(f.double(), w, rtol=loose, atol=loose)


@pytest.mark.parametrize("is_rms_norm", [False, True])
@DTYPES
def test_norm_references(dtype, is_rms_norm):
    """flash-attn's references: the dtypes of their arguments, or float32 with upcast, and dropout by given masks."""
    x, x1, residual = (draw(2, 5, 24, dtype=dtype) for _ in range(3))
    weight, bias, weight1, bias1 = (draw(24, dtype=dtype) for _ in range(4))
    mask, mask1 = (torch.rand(2, 5, 24) > 0.3 for _ in range(2))
    reference, function = (norms.rms_norm_ref, norms.rms_norm_fn) if is_rms_norm else (norms.layer_norm_ref, norms.layer_norm_fn)
    dropped, dropped1 = ((t.double() * keep / 0.75).to(dtype) for t, keep in ((x, mask), (x1, mask1)))
    options = {"eps": 1e-3, "prenorm": True, "zero_centered_weight": True}
    expected = function(dropped, weight, bias, residual, dropped1, weight1, bias1, **options)
    dropout = {"dropout_p": 0.25, "dropout_mask": mask, "dropout_mask1": mask1}
    for upcast in (False, True):
        found = reference(x, weight, bias, residual, x1, weight1, bias1, **dropout, upcast=upcast, **options)
        wide = torch.float32 if upcast else dtype
        assert [t.dtype for t in found] == [dtype, dtype, wide]
        for f, e in zip(found, expected):
            loose = 1e-5 if dtype != torch.float16 else 2e-2
            torch.testing.assert_close(f.double(), e.double(), rtol=loose, atol=loose)
    scale = draw(2, 5, dtype=dtype)
    loose = 1e-6 if dtype != torch.float16 else 2e-2
    found, expected = reference(x, weight, None, rowscale=scale, upcast=True), function(x, weight, None, rowscale=scale)
    torch.testing.assert_close(found, expected, rtol=loose, atol=loose)
    kept = reference(torch.ones_like(x), weight, None, dropout_p=0.25, prenorm=True)[1]
    assert set(kept.flatten().tolist()) == {0.0, (torch.ones((), dtype=dtype) / 0.75).item()}


@pytest.mark.parametrize("is_rms_norm", [False, True])
def test_a_linear_layer_of_a_norm(is_rms_norm):
    x, residual, weight, bias = draw(2, 5, 24), draw(2, 5, 24), draw(24), draw(24)
    matrix, shift = draw(7, 24), draw(7)
    options = {"eps": 1e-3, "is_rms_norm": is_rms_norm}
    out, total = norms.layer_norm_linear_fn(x, weight, bias, matrix, shift, residual, prenorm=True, **options)
    close(total, x + residual)
    expected = norms.layer_norm_fn(x, weight, bias, residual, **options) @ matrix.T + shift
    close(out, expected)
    for f, e in zip(gradients(out, [x, residual, weight, matrix, shift]), gradients(expected, [x, residual, weight, matrix, shift])):
        close(f, e)
    half = norms.layer_norm_linear_fn(x.half(), weight, None, matrix, None, residual_in_fp32=True, prenorm=True, **options)
    assert [t.dtype for t in half] == [torch.float16, torch.float32]
    with torch.autocast("cpu", torch.bfloat16):
        assert norms.layer_norm_linear_fn(x.float(), weight.float(), None, matrix.float(), None, **options).dtype == torch.bfloat16


def test_norm_options():
    x, weight, scale = draw(4, 6, dtype=torch.float16), draw(6), draw(4)
    plain = norms.rms_norm_fn(x, weight, None)
    assert torch.equal(plain, norms.rms_norm(x, weight, 1e-6))
    assert norms.rms_norm_fn(x, weight, None, out_dtype=torch.float32).dtype == torch.float32
    _, total = norms.rms_norm_fn(x, weight, None, prenorm=True, residual_in_fp32=True)
    assert total.dtype == torch.float32 and torch.equal(total, x.float())
    y, total = norms.layer_norm_fn(x, weight, None, rowscale=scale, prenorm=True, residual=x.float())
    close(total, x.double() * scale[:, None].float() + x)
    into, sum_into = torch.empty_like(x), torch.empty_like(x)
    with torch.no_grad():
        y, total = norms.rms_norm_fn(x, weight, None, prenorm=True, out=into, residual_out=sum_into)
    assert y is into and total is sum_into and torch.equal(y, plain) and torch.equal(total, x)
    refused(ValueError, r"x: got dtype torch.int64, expected a floating-point", norms.rms_norm_fn, x.long(), weight, None)
    wrong = {"residual": x[:3], "out": x[None], "residual_out": x[:1], "rowscale": scale[:1], "bias": weight[:1], "weight1": weight[None]}
    for name, t in wrong.items():  # most would broadcast
        message = rf"{name}: got shape \({str(tuple(t.shape))[1:-1]}\), expected shape"
        refused(ValueError, message, norms.rms_norm_fn, x, weight, **{"bias": None, "prenorm": True, name: t})
    refused(ValueError, r"rowscale: got a tensor, expected None with x1", norms.rms_norm_fn, x, weight, None, x1=x, rowscale=scale)


def test_norm_dropout():
    x, x1, weight = draw(50, 40), draw(50, 40), torch.ones(40, dtype=torch.float64)
    y, total, mask, mask1 = norms.layer_norm_fn(x, weight, None, x1=x1, dropout_p=0.25, prenorm=True, return_dropout_mask=True)
    close(total, (x * mask + x1 * mask1) / 0.75)
    close(y, functional.layer_norm(total, (40,), eps=1e-6))
    assert all(abs((~m).double().mean() - 0.25) < 0.05 for m in (mask, mask1)) and not torch.equal(mask, mask1)
    x.requires_grad_()
    y = norms.layer_norm_fn(x, weight, None, residual=x1, dropout_p=1.0)
    assert not torch.autograd.grad(y.sum(), x)[0].any(), "everything is dropped"
    x = x.detach()
    options = {"layerscale": weight * 2, "prenorm": True, "return_dropout_mask": True}
    y, total, mask = norms.dropout_add_rms_norm(x, x1, weight, None, dropout_p=0.0, epsilon=1e-6, **options)
    assert mask.all()
    close(total, x * 2 + x1)


def test_norm_modules():
    x, residual = draw(3, 8), draw(3, 8)
    for module in (norms.RMSNorm(8, dtype=torch.float64), norms.RMSNorm(8, zero_centered_weight=True, dtype=torch.float64)):
        close(module(x), functional.rms_norm(x, (8,), eps=1e-5))
        close(module(x, residual, prenorm=True)[1], x + residual)
    module = norms.RMSNorm(8, dropout_p=0.5)
    assert (module(torch.ones(4, 8)) == 0).any() and not (module.eval()(torch.ones(4, 8)) == 0).any()
    y, total = norms.DropoutAddRMSNorm(8, prenorm=True, dtype=torch.float64)(x, residual)
    close(y, functional.rms_norm(x + residual, (8,), eps=1e-5))


def heads(t, nheads):
    """(batch, seqlen, nheads, headdim) to (batch, nheads, seqlen, headdim), heads repeated."""
    return t.transpose(1, 2).repeat_interleave(nheads // t.shape[2], dim=1)


def attend(q, kv, hidden=None, bias=0.0):
    """Returns attention by single operations. Hidden keys get the score -10000, as in flash-attn's modules."""
    k, v = (heads(t, q.shape[2]) for t in kv.unbind(2))
    scores = heads(q, q.shape[2]) @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, -10000.0)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def later(seqlen_q, seqlen_k):
    """Returns which keys a causal mask hides."""
    return torch.ones(seqlen_q, seqlen_k).triu(1 + seqlen_k - seqlen_q).bool()


def test_alibi_slopes():
    assert mha.get_alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert mha.get_alibi_slopes(16)[:2] == [2**-0.5, 2**-1.0]
    twelve = [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert mha.get_alibi_slopes(12) == pytest.approx(twelve, rel=1e-12) and mha.get_alibi_slopes(1) == [2.0**-8]


@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention(causal):
    """SelfAttention and CrossAttention, flash-attn's modules without its kernels, also with padding of keys."""
    qkv, q, kv = draw(2, 6, 3, 4, 8), draw(2, 3, 4, 8), draw(2, 6, 2, 2, 8)
    keep = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    mask = later(6, 6) if causal else torch.zeros(6, 6, dtype=torch.bool)
    module = mha.SelfAttention(causal=causal)
    close(module(qkv), attend(qkv[:, :, 0], qkv[:, :, 1:], mask))
    close(module(qkv, key_padding_mask=keep), attend(qkv[:, :, 0], qkv[:, :, 1:], mask | ~keep[:, None, None, :]))
    hidden = module(qkv, causal=False, key_padding_mask=torch.zeros_like(keep))
    close(hidden, attend(qkv[:, :, 0], qkv[:, :, 1:]))  # rows without a visible key attend to all
    module = mha.CrossAttention()
    close(module(q, kv, causal=causal), attend(q, kv, later(3, 6) if causal else None))
    if causal:  # rows that see no key
        longer, average = draw(2, 8, 4, 8), kv[:, :, 1].mean(1).repeat_interleave(2, 1)
        close(module(longer, kv, causal=True)[:, :2], average[:, None].expand(-1, 2, -1, -1))
        close(module(longer, kv, causal=True)[:, 2:], attend(longer[:, 2:], kv, later(6, 6)))
        for kept in (keep, keep.flip(1)):  # the latter: rows that see keys of padding alone
            masks = torch.stack([later(8, 6), torch.ones(8, 6).triu(1 + kept[1].sum() - 8).bool()])[:, None]
            padded = module(longer, kv, causal=True, key_padding_mask=kept)
            close(padded, attend(longer, kv, masks, -10000.0 * ~kept[:, None, None, :]))
        close(module(longer, kv, causal=True, key_padding_mask=keep)[1, :4], average[1].expand(4, -1, -1))
        # bf16 has a spacing of 64 at -10000: a row that sees padding alone has equal scores
        in_bf16 = module(longer.bfloat16(), kv.bfloat16(), causal=True, key_padding_mask=keep.flip(1))[1, 4:6]
        torch.testing.assert_close(in_bf16.double(), average[1].expand(2, -1, -1), rtol=2e-2, atol=2e-2)
    masks = torch.stack([later(3, 6), torch.ones(3, 6).triu(2).bool()])[:, None] if causal else torch.zeros(1, 1, 3, 6, dtype=torch.bool)
    close(module(q, kv, causal=causal, key_padding_mask=keep), attend(q, kv, masks | ~keep[:, None, None, :]))


MHA_CASES = {
    "self": {"causal": True},
    "grouped": {"num_heads_kv": 2, "causal": True},
    "rotary": {"rotary_emb_dim": 8, "causal": True, "checkpointing": True},
    "grouped rotary": {"num_heads_kv": 2, "rotary_emb_dim": 8, "rotary_emb_interleaved": True},
    "cross": {"cross_attn": True, "num_heads_kv": 2},
}


@pytest.mark.parametrize("use_flash_attn", [False, True])
@pytest.mark.parametrize("case", MHA_CASES)
def test_mha(case, use_flash_attn):
    """MHA equals its projections around attention in plain PyTorch, with its gradients."""
    options = MHA_CASES[case]
    torch.manual_seed(1)
    module = MHA(32, 4, use_flash_attn=use_flash_attn, dtype=torch.float64, **options)
    x, x_kv = draw(2, 7, 32), draw(2, 9, 32)
    cross, nheads_k = options.get("cross_attn", False), options.get("num_heads_kv", 4)
    if cross:
        q, kv, found = module.Wq(x), module.Wkv(x_kv), module(x, x_kv)
    else:
        (q, kv), found = module.Wqkv(x).split([32, 16 * nheads_k], -1), module(x)
    q, kv = q.unflatten(-1, (4, 8)), kv.unflatten(-1, (2, nheads_k, 8))
    if "rotary_emb_dim" in options:
        q, kv = RotaryEmbedding(8, interleaved=options.get("rotary_emb_interleaved", False))(q.clone(), kv.clone())
    right = module.out_proj(attend(q, kv, later(7, 7) if options.get("causal") else None).flatten(-2))
    close(found, right)
    for f, w in zip(gradients(found, [x, *module.parameters()]), gradients(right, [x, *module.parameters()])):
        close(f, w)


@pytest.mark.parametrize("nheads_k", [2, 4])
def test_mha_packed(nheads_k):
    """MHA with a window and ALiBi gives packed sequences the results that each has alone."""
    module = MHA(32, 4, nheads_k, causal=True, use_flash_attn=True, window_size=(3, 0), use_alibi=True, dtype=torch.float64)
    x, cu_seqlens = draw(12, 32), torch.tensor([0, 5, 12], dtype=torch.int32)
    found = module(x, cu_seqlens=cu_seqlens, max_seqlen=7)
    right = torch.cat([module(part[None])[0] for part in x.split([5, 7])])
    close(found, right)
    i, j = torch.arange(7)[:, None], torch.arange(7)
    q, kv = module.Wqkv(x[None, 5:]).split([32, 16 * nheads_k], -1)
    bias = -torch.tensor(mha.get_alibi_slopes(4), dtype=torch.float64)[:, None, None] * (i - j).abs()
    by_hand = attend(q.unflatten(-1, (4, 8)), kv.unflatten(-1, (2, nheads_k, 8)), (j > i) | (j < i - 3), bias)
    close(found[5:], module.out_proj(by_hand.flatten(-2))[0])


@pytest.mark.parametrize("use_flash_attn", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_heads_kv": 2, "rotary_emb_dim": 8}], ids=str)
@torch.no_grad()
def test_mha_decodes_from_a_cache(options, use_flash_attn):
    """Token by token after a prompt, as the whole sequence at once."""
    module = MHA(32, 4, causal=True, layer_idx=3, use_flash_attn=use_flash_attn, return_residual=True, dtype=torch.float64, **options)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    right, same = module(x)
    assert same is x
    params = SimpleNamespace(max_seqlen=12, max_batch_size=3, seqlen_offset=0, batch_size_offset=0)
    params.key_value_memory_dict, params.lengths_per_sample = {}, None
    found = [module(x[:, :6], inference_params=params)[0]]
    for params.seqlen_offset in range(6, 9):
        if use_flash_attn and params.seqlen_offset == 7:
            params.lengths_per_sample = torch.tensor([7, 7], dtype=torch.int32)
        found.append(module(x[:, params.seqlen_offset][:, None], inference_params=params)[0])
        params.lengths_per_sample = None
    full = [(12, 0, r"at least 2 and 13: raise"), (8, 2, r"a cache of 3 sequences and 12 tokens, expected at least 4 and 9")]
    for params.seqlen_offset, params.batch_size_offset, message in full:
        refused(ValueError, message, module, x[:, :1], inference_params=params)
    # rotary tables are in the dtype of q, rounded from fp32
    torch.testing.assert_close(torch.cat(found, 1), right, rtol=1e-6, atol=1e-6)


def test_module_errors():
    qkv, cu_seqlens = draw(5, 3, 4, 8), torch.tensor([0, 5], dtype=torch.int32)
    refused(ValueError, r"max_seqlen: got None", mha.FlashSelfAttention(), qkv, cu_seqlens=cu_seqlens)
    refused(ValueError, r"cu_seqlens_k, .*: got None", mha.FlashCrossAttention(), qkv[:, 0], qkv[:, 1:], None, cu_seqlens, 5)
    refused(NotImplementedError, r"dwconv: got True", MHA, 32, 4, dwconv=True)
    refused(ValueError, r"use_flash_attn: got False, expected True with use_alibi", MHA, 32, 4, use_alibi=True)
    refused(ValueError, r"embed_dim, num_heads, num_heads_kv: got 32, 4 and 3", MHA, 32, 4, 3)
    refused(ValueError, r"rotary_emb_dim: got 8, expected 0 with cross_attn", MHA, 32, 4, cross_attn=True, rotary_emb_dim=8)
    x = draw(2, 5, 32)
    module = MHA(32, 4, dtype=torch.float64)
    refused(ValueError, r"x_kv, mixer_subset: got values", module, x, x)
    refused(ValueError, r"cu_seqlens: got a tensor, expected None without use_flash_attn", module, x[0], cu_seqlens=cu_seqlens)
    refused(ValueError, r"layer_idx: got None, expected a number", module, x, inference_params=SimpleNamespace())
    module = MHA(32, 4, use_flash_attn=True, dtype=torch.float64)
    refused(ValueError, r"key_padding_mask: got a tensor, expected None with use_flash_attn", module, x, key_padding_mask=x[..., 0] > 0)
