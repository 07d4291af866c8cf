"""volta_fa.bert_padding and volta_fa.rotary: flash-attn's functions for padding, and its rotary embeddings, in plain PyTorch.

The expected rotation is `rotate` of volta_fa.check, in fp64. It turns pairs of columns: 2i and 2i + 1 if interleaved, else i and
i + rotary_dim / 2. Tests compare values, gradients, and tensors that are changed in place."""

import math

import pytest
import torch

import volta_fa.rotary
from volta_fa.bert_padding import index_first_axis, index_put_first_axis, pad_input, unpad_input, unpad_input_for_concatenated_sequences
from volta_fa.check.cache_cases import rotate
from volta_fa.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_, apply_rotary_emb_torch

#: Which of 4 tokens of 4 sequences are there (1) and which are padding (0).
MASK = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()  # so that later files compile anew


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("unused", [False, True])
def test_unpad_input(dtype, unused):
    """Tokens of the unused mask are kept in the batch, but `used` does not count them."""
    x = torch.randn(4, 4, 2, 3)
    unused_mask = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0] * 4])
    kept = MASK + unused_mask if unused else MASK
    places = [(b, i) for b in range(4) for i in range(4) if kept[b, i]]
    tokens, indices, cu_seqlens, max_seqlen, used = unpad_input(x, MASK.to(dtype), unused_mask.to(dtype) if unused else None)
    assert torch.equal(tokens, torch.stack([x[place] for place in places]))
    assert indices.dtype == torch.int64 and indices.tolist() == [4 * b + i for b, i in places]
    lengths = [sum(place[0] == b for place in places) for b in range(4)]
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [sum(lengths[:b]) for b in range(5)]
    assert type(max_seqlen) is int and max_seqlen == max(lengths)
    assert used.dtype == torch.int32 and used.tolist() == MASK.sum(1).tolist()


def test_unpad_input_rejects_masks_of_other_shapes():
    x = torch.randn(2, 6, 5)
    for shape in ((3, 4), (2, 4), (1, 6), (1, 2, 6)):  # of these tokens would be kept
        message = rf"got shape \({str(shape)[1:-1]}\), expected shape \(2, 6\), \(batch, seqlen\)"
        with pytest.raises(ValueError, match=f"attention_mask: {message}"):
            unpad_input(x, torch.ones(shape))
        with pytest.raises(ValueError, match=f"unused_mask: {message}"):
            unpad_input(x, torch.ones(2, 6), torch.zeros(shape))
        with pytest.raises(ValueError, match=f"attention_mask_in_length: {message}"):
            unpad_input_for_concatenated_sequences(x, torch.ones(shape, dtype=torch.int32))


@pytest.mark.parametrize("mask", [[2, 1, 0], [1, -1, 0], [0.5, 1.5, 0.0], [0.0, 0.0, -1e9], [0.0, 0.0, -math.inf], [1.0, 1.0, math.nan]])
def test_unpad_input_rejects_other_values_than_0_and_1(mask):
    x = torch.randn(2, 3, 5)
    with pytest.raises(ValueError, match="attention_mask: got other values than 0 and 1, expected 1 for tokens and 0 for padding: pass"):
        unpad_input(x, torch.tensor([[1, 1, 0], mask]))
    with pytest.raises(ValueError, match=r"attention_mask \+ unused_mask: got other values"):  # a token of both would count twice
        unpad_input(x, torch.ones(2, 3), torch.tensor([[0, 0, 0], [0, 1, 0]]))


@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_pad_input_is_the_inverse(shape):
    x = torch.randn(4, 4, *shape, dtype=torch.float64).requires_grad_()
    tokens, indices, *_ = unpad_input(x, MASK)
    padded = pad_input(tokens, indices, 4, 4)
    mask = MASK.view(4, 4, *[1] * len(shape))
    assert padded.shape == x.shape and torch.equal(padded, x * mask)
    weights = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(padded, x, weights)
    assert torch.equal(gradient, weights * mask)


def test_unpad_concatenated_sequences():
    """`lengths` has the lengths of the sequences that an entry holds one after the other, then zeros."""
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0], [0] * 6])
    x = torch.randn(4, 6, 5)
    tokens, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(tokens, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16]
    assert type(max_seqlen) is int and max_seqlen == 6


@pytest.mark.parametrize("lengths", [[2, 2, 0], [4, 0, 0], [3, -1, 0]])
def test_unpad_concatenated_sequences_rejects_lengths_that_do_not_fit(lengths):
    with pytest.raises(ValueError, match="attention_mask_in_length: got negative lengths or rows with more tokens than seqlen, expected"):
        unpad_input_for_concatenated_sequences(torch.randn(2, 3, 5), torch.tensor([[1, 2, 0], lengths]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_index_functions(dtype):
    x, indices = torch.randn(6, 2, 3, dtype=torch.float64).requires_grad_(), torch.tensor([4, 0, 5], dtype=dtype)
    assert torch.equal(index_first_axis(x, indices), x[[4, 0, 5]])
    assert torch.autograd.gradcheck(index_first_axis, (x, indices))
    values = torch.randn(3, 2, dtype=torch.float64).requires_grad_()
    rows = index_put_first_axis(values, indices, 7)
    assert torch.equal(rows[indices], values) and rows.shape == (7, 2) and (rows[[1, 2, 3, 6]] == 0).all()
    assert torch.autograd.gradcheck(index_put_first_axis, (values, indices, 7))


def tables(positions, pairs, dtype=torch.float64):
    """Returns random tables cos and sin, (positions, pairs of columns)."""
    angles = torch.randn(positions, pairs, dtype=torch.float64) * 3
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turned(x, cos, sin, positions, interleaved=False):
    """Returns x (tokens, nheads, headdim) rotated by the tables' rows `positions`. Tokens beyond the tables stay as they are."""
    positions = torch.tensor(list(positions))
    inside = positions < len(cos)
    result = x.detach().double()
    return result.index_put((inside,), rotate(result[inside], cos, sin, positions[inside], interleaved))


LAYOUTS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


@LAYOUTS
@pytest.mark.parametrize("rotary_dim", [16, 10], ids=["whole", "part"])
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("offsets", [0, 3, torch.tensor([5, 0, 2]), torch.tensor([9, 0, 2], dtype=torch.int32)], ids=str)
def test_apply_rotary_emb(interleaved, rotary_dim, inplace, offsets):
    """Some offsets lead beyond the table of 12 positions."""
    x, (cos, sin) = torch.randn(3, 7, 2, 16, dtype=torch.float64).requires_grad_(), tables(12, rotary_dim // 2)
    starts = offsets.tolist() if isinstance(offsets, torch.Tensor) else [offsets] * 3  # a number is for all sequences
    positions = [range(start, start + 7) for start in starts]
    want = torch.stack([turned(x[b], cos, sin, positions[b], interleaved) for b in range(3)])
    before = x.detach().clone()
    out = apply_rotary_emb(x, cos, sin, interleaved=interleaved, inplace=inplace, seqlen_offsets=offsets)
    torch.testing.assert_close(out, want)
    assert torch.equal(x, want if inplace else before) or (inplace and torch.allclose(x, want))
    assert (out.data_ptr() == x.data_ptr()) == inplace
    # a rotation's gradient is the rotation backwards
    dout = torch.randn_like(want)
    given = dout.clone()
    (dx,) = torch.autograd.grad(out, x, dout)
    torch.testing.assert_close(dx, torch.stack([turned(dout[b], cos, -sin, positions[b], interleaved) for b in range(3)]))
    assert torch.equal(dout, given), "a gradient is not ours to change"


@LAYOUTS
@pytest.mark.parametrize("offsets", [0, 2, torch.tensor([3, 1, 0, 6])], ids=str)
def test_apply_rotary_emb_of_packed_sequences(interleaved, offsets):
    lengths, (cos, sin) = [4, 0, 5, 1], tables(9, 8)
    x = torch.randn(10, 2, 16, dtype=torch.float64).requires_grad_()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    starts = offsets.tolist() if isinstance(offsets, torch.Tensor) else [offsets] * 4
    positions = [start + i for start, length in zip(starts, lengths) for i in range(length)]
    out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets, cu_seqlens=cu_seqlens, max_seqlen=5)
    torch.testing.assert_close(out, turned(x, cos, sin, positions, interleaved))
    longer = torch.cat((x, torch.randn_like(x)))  # rows after the last sequence, as in a padded batch, stay the same
    rotated = apply_rotary_emb(longer, cos, sin, interleaved, seqlen_offsets=offsets, cu_seqlens=cu_seqlens, max_seqlen=5)
    assert torch.equal(rotated, torch.cat((out, longer[10:])))
    short = apply_rotary_emb(x, cos[:4], sin[:4], interleaved, seqlen_offsets=offsets, cu_seqlens=cu_seqlens, max_seqlen=1)
    turns = torch.tensor([position < 4 for position in positions])  # others lie outside the tables
    assert torch.equal(short[turns], out[turns]) and torch.equal(short[~turns], x[~turns])
    dout = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, x, dout)[0], turned(dout, cos, -sin, positions, interleaved))


@LAYOUTS
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_conjugate_of_apply_rotary_is_its_inverse(interleaved, inplace):
    """apply_rotary, which transformers' ModernBERT calls, has no gradient. `conjugate` rotates back."""
    x, (cos, sin) = torch.randn(2, 5, 3, 8, dtype=torch.float64), tables(5, 4)
    want = x.clone()
    there = volta_fa.rotary.apply_rotary(x, cos, sin, interleaved=interleaved, inplace=inplace)
    assert not torch.allclose(there, want) and (there is x) == inplace
    torch.testing.assert_close(volta_fa.rotary.apply_rotary(there, cos, sin, interleaved=interleaved, conjugate=True), want)


def test_half_precision_is_rounded_once():
    x, (cos, sin) = torch.randn(2, 5, 3, 8).half(), tables(5, 4, torch.float16)
    want = torch.stack([turned(entry, cos, sin, range(5)) for entry in x])
    out = volta_fa.rotary.apply_rotary_emb_func(x, cos, sin)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.double(), want, rtol=2**-11 * 1.01, atol=1e-6)  # fp16's unit roundoff is 2^-11


@LAYOUTS
@pytest.mark.parametrize("form", ["five", "four"])
@pytest.mark.parametrize("own_tables", [False, True], ids=["shared", "own"])
def test_apply_rotary_emb_qkv(interleaved, form, own_tables):
    """qkv of five dimensions, or of four (all heads of q, then of k, then of v). k may have tables of its own."""
    cos, sin = tables(9, 4)
    cos_k, sin_k = tables(9, 4) if own_tables else (None, None)
    qkv = torch.randn(2, 6, 3, 4, 8, dtype=torch.float64) if form == "five" else torch.randn(2, 6, 4 + 2 * 2, 8, dtype=torch.float64)
    at_q, at_k = ((slice(None), slice(None), i) for i in ((0, 1) if form == "five" else (slice(4), slice(4, 6))))

    def want(q, k, sign=1):
        turn = lambda x, c, s: torch.stack([turned(e, c, sign * s, range(2, 8), interleaved) for e in x])  # noqa: E731
        return turn(q, cos, sin), turn(k, *((cos_k, sin_k) if own_tables else (cos, sin)))

    expected = qkv.clone()
    expected[at_q], expected[at_k] = want(qkv[at_q], qkv[at_k])
    leaf = qkv.clone().requires_grad_()
    options = {"interleaved": interleaved, "seqlen_offsets": 2, "num_heads_q": 4 if form == "four" else None}
    out = apply_rotary_emb_qkv_(leaf, cos, sin, cos_k, sin_k, **options)
    torch.testing.assert_close(out, expected)
    assert out.data_ptr() == leaf.data_ptr()
    dout = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, leaf, dout)
    back = dout.clone()
    back[at_q], back[at_k] = want(dout[at_q], dout[at_k], -1)
    torch.testing.assert_close(gradient, back)


@LAYOUTS
def test_apply_rotary_emb_kv(interleaved):
    kv, (cos, sin), offsets = torch.randn(2, 6, 2, 3, 8, dtype=torch.float64), tables(9, 4), torch.tensor([3, 1])
    expected = kv.clone()
    for b in range(2):
        expected[b, :, 0] = turned(kv[b, :, 0], cos, sin, range(offsets[b], offsets[b] + 6), interleaved)
    out = apply_rotary_emb_kv_(kv, cos, sin, interleaved, offsets)
    torch.testing.assert_close(out, expected)
    assert out.data_ptr() == kv.data_ptr()


@pytest.mark.parametrize(
    "starts, message",
    [
        ([2, 3, 10], "cu_seqlens: got 2 as its first value, expected 0"),
        ([0, 7, 3, 10], r"cu_seqlens: got 3 after 7 \(entry 2\), expected values that never descend"),
        ([0, 3, 11], "cu_seqlens: got 11 as its last value, expected at most 10, the rows of x"),
        ([0.0, 3.0, 10.0], "cu_seqlens: got dtype torch.float32, expected torch.int32 or torch.int64"),
        ([[0, 3, 10]], r"cu_seqlens: got shape \(1, 3\), expected \(batch \+ 1,\)"),
        ([], r"cu_seqlens: got shape \(0,\), expected \(batch \+ 1,\)"),
    ],
)
def test_apply_rotary_rejects_impossible_cu_seqlens(starts, message):
    """With [2, 3, 10], tokens 0 and 1 took the rows of a sequence that does not have them."""
    cu_seqlens = torch.tensor(starts)
    x, offsets = torch.randn(10, 2, 8), torch.full((max(0, cu_seqlens.numel() - 1),), 9)
    with pytest.raises(ValueError, match=message):
        volta_fa.rotary.apply_rotary(x, *tables(20, 4), offsets, cu_seqlens, 10)


def test_rejected_rotations_write_nothing():
    """q and k are rotated one after the other, in place. Wrong arguments of k are found before q is written."""
    (cos, sin), (short_cos, short_sin) = tables(9, 4), tables(3, 4)
    qkv, q, kv = torch.randn(2, 5, 3, 2, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 9, 2, 2, 8)
    before = qkv.clone(), q.clone()
    for tables_k in ((short_cos, short_sin), (cos, short_sin), (cos.int(), sin), (None, short_sin), (cos.tolist(), sin)):
        with pytest.raises(ValueError, match="volta_fa: (cos|sin): got "):
            apply_rotary_emb_qkv_(qkv, cos, sin, *tables_k)
    rotary = RotaryEmbedding(8)
    for wrong in (kv, kv[:, :5, :1], kv[:, :5, ..., :4], kv[:, :5].int(), kv[:1, :5], [kv]):
        with pytest.raises(ValueError, match="volta_fa: [a-z_]+: got "):
            rotary(q, wrong, seqlen_offset=torch.tensor([0, 1]), max_seqlen=6)
    assert torch.equal(qkv, before[0]) and torch.equal(q, before[1])


#: Functions by name, and calls: the input's shape and options.
SYMBOLIC = {
    "qkv": (apply_rotary_emb_qkv_, [((4, 21, 3, 4, 8), {}), ((4, 21, 8, 8), {"num_heads_q": 4})]),
    "kv": (apply_rotary_emb_kv_, [((2, 5, 2, 3, 8), {"seqlen_offsets": 1}), ((2, 7, 2, 3, 8), {"seqlen_offsets": 4})]),
    "x": (
        apply_rotary_emb,
        [((2, 5, 3, 16), {"inplace": True}), ((3, 6, 3, 16), {"inplace": True, "seqlen_offsets": torch.tensor([1, 0, 3])})],
    ),
    "copy": (apply_rotary_emb, [((2, 5, 3, 16), {}), ((3, 6, 3, 16), {"interleaved": True})]),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_rotary_compiles_with_symbolic_sizes(name):
    """Sizes are symbolic once a second shape came, even one of another rank. The gradient, and what is written in place, stay."""
    function, calls = SYMBOLIC[name]
    cos, sin = tables(30, 4)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for shape, options in calls:
        x, dout = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
        found = []
        for call in (function, compiled):
            leaf = x.clone().requires_grad_()
            out = call(leaf, cos, sin, **options)
            found.append((out, *torch.autograd.grad(out, leaf, dout), leaf))
        torch.testing.assert_close(found[1], found[0])
        assert torch.equal(found[1][-1], x) == (name == "copy")


@pytest.mark.parametrize("batched", [False, True])
@LAYOUTS
def test_apply_rotary_emb_torch(interleaved, batched):
    """flash-attn's reference: tables with a row for each token, of one sequence or of each, and gradients for them."""
    x, (cos, sin) = torch.randn(2, 5, 3, 12, dtype=torch.float64).requires_grad_(), tables(10, 4)
    cos, sin = (t.view(2, 5, 4) if batched else t[:5] for t in (cos, sin))
    rows = [(cos[b], sin[b]) if batched else (cos, sin) for b in range(2)]
    want = torch.stack([turned(x[b], *rows[b], range(5), interleaved) for b in range(2)])
    torch.testing.assert_close(apply_rotary_emb_torch(x, cos, sin, interleaved), want)
    cos, sin = cos.clone().requires_grad_(), sin.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda *args: apply_rotary_emb_torch(*args, interleaved), (x, cos, sin))
    assert apply_rotary_emb_torch(x.half(), cos, sin).dtype == torch.float16


def angle_tables(dim, base, positions):
    """Returns cos and sin of position * base^(-2i / dim) for pair i."""
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return angles.cos(), angles.sin()


@LAYOUTS
def test_rotary_embedding(interleaved):
    rotary = RotaryEmbedding(8, base=500.0, interleaved=interleaved)
    assert not rotary.state_dict(), "what can be computed is not saved"
    qkv = torch.randn(2, 6, 3, 2, 16)
    cos, sin = angle_tables(8, 500.0, 10)

    def is_rotated(found, x, first):
        """Checks x (seqlen, nheads, headdim) at positions from `first` on."""
        want = turned(x, cos, sin, range(first, first + len(x)), interleaved)
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)

    for offset in (0, 4, 1):  # the tables grow, and stay
        out = rotary(qkv.clone(), seqlen_offset=offset)
        for b in range(2):
            for part in range(2):
                is_rotated(out[b, :, part], qkv[b, :, part], offset)
        assert torch.equal(out[:, :, 2], qkv[:, :, 2])
    assert len(rotary._cos_cached) == 10

    q, kv = torch.randn(2, 6, 4, 16), torch.randn(2, 6, 2, 2, 16)
    offsets = torch.tensor([0, 3])
    new_q, new_kv = rotary(q.clone(), kv.clone(), seqlen_offset=offsets, max_seqlen=9)
    for b in range(2):
        is_rotated(new_q[b], q[b], offsets[b])
        is_rotated(new_kv[b, :, 0], kv[b, :, 0], offsets[b])
    assert torch.equal(new_kv[:, :, 1], kv[:, :, 1])

    gqa = torch.randn(1, 5, 4 + 2 + 2, 16)
    out = rotary(gqa.clone(), num_heads_q=4)
    is_rotated(out[0, :, :6], gqa[0, :, :6], 0)
    assert torch.equal(out[:, :, 6:], gqa[:, :, 6:])


def test_rotary_embedding_grows_its_tables_by_max_seqlen_or_by_an_int_offset():
    """A tensor of offsets alone does neither: tokens past the tables are not rotated."""
    rotary, qkv, offsets = RotaryEmbedding(8), torch.randn(1, 2, 3, 1, 8), torch.tensor([4])
    with pytest.raises(ValueError, match="max_seqlen: got None"):
        rotary(qkv.clone(), seqlen_offset=offsets)
    rotary(qkv.clone(), max_seqlen=5)
    out, expected = rotary(qkv.clone(), seqlen_offset=offsets), rotary(qkv.clone(), seqlen_offset=offsets, max_seqlen=6)
    assert torch.equal(out[:, 1], qkv[:, 1]) and torch.equal(out[:, 0], expected[:, 0])
    assert not torch.equal(expected[:, 1, :2], qkv[:, 1, :2])


def test_rotary_embedding_of_a_module_in_half_precision():
    """Tables are computed in float32 whatever the module was cast to, and given in the input's dtype."""
    rotary, whole = RotaryEmbedding(8).half(), RotaryEmbedding(8)
    x = torch.randn(1, 3000, 3, 1, 8)
    out = rotary(x.half())
    assert out.dtype == torch.float16 and rotary._cos_cached.dtype == torch.float16
    torch.testing.assert_close(out.float(), whole(x.clone()), rtol=1e-2, atol=1e-2)


def test_rotary_embedding_compiles():
    """The tables grow in a compiled program too, whose sizes are symbolic from the second length on."""
    rotary, compiled = RotaryEmbedding(8), torch.compile(RotaryEmbedding(8), backend="aot_eager", fullgraph=True)
    for seqlen in (5, 7, 6):
        qkv = torch.randn(2, seqlen, 3, 2, 16, requires_grad=True)
        found, expected = compiled(qkv * 1), rotary(qkv * 1)
        torch.testing.assert_close(found, expected)
        weights = torch.randn_like(expected)
        torch.testing.assert_close(torch.autograd.grad(found, qkv, weights), torch.autograd.grad(expected, qkv, weights))


def test_rotary_embedding_trains_after_inference_mode():
    """Tables made in inference mode are ordinary tensors. Autograd could not save inference tensors for a later backward."""
    rotary = RotaryEmbedding(8).train()
    with torch.inference_mode():
        rotary(torch.randn(1, 4, 3, 1, 8))
    x = torch.randn(1, 4, 3, 1, 8).requires_grad_()
    rotary(x * 1).sum().backward()
    assert x.grad.isfinite().all() and not rotary._cos_cached.is_inference()


def test_xpos():
    """xPos scales q by a power of its position and k by the inverse, so that scores depend on the distance only."""
    rotary = RotaryEmbedding(8, scale_base=4.0)
    q, k = torch.randn(8).expand(1, 12, 1, 8), torch.randn(8).expand(1, 12, 1, 8)
    new_q, kv = rotary(q.clone(), torch.stack((k, k), dim=2))
    scores = torch.einsum("id,jd->ij", new_q[0, :, 0].double(), kv[0, :, 0, 0].double())
    for distance in range(-3, 12):
        band = scores.diagonal(-distance)
        torch.testing.assert_close(band, band[:1].expand_as(band), rtol=1e-4, atol=1e-4)
    power = ((torch.arange(0, 8, 2) + 3.2) / 11.2).double()  # (2 i + 0.4 dim) / (1.4 dim)
    cos, sin = angle_tables(8, 10000.0, 12)
    factor = (power[None] ** ((torch.arange(12) - 6)[:, None] / 4)).repeat(1, 2)
    torch.testing.assert_close(new_q[0, :, 0].double(), turned(q[0], cos, sin, range(12))[:, 0] * factor, rtol=1e-4, atol=1e-4)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    "message, call",
    [
        (r"x: got shape \(5, 2, 8\), expected \(batch, seqlen", lambda x, c: apply_rotary_emb(x[0], c, c)),
        (
            r"x: got shape \(2, 5, 2, 8\), expected \(total",
            lambda x, c: apply_rotary_emb(x, c, c, cu_seqlens=ints(0, 10).long(), max_seqlen=5),
        ),
        (r"max_seqlen: got None", lambda x, c: apply_rotary_emb(x[0], c, c, cu_seqlens=ints(0, 5).long())),
        (r"cos: got shape \(6, 5\)", lambda x, c: apply_rotary_emb(x, torch.ones(6, 5), torch.ones(6, 5))),
        (r"cos: got dtype torch.complex64, expected a floating", lambda x, c: apply_rotary_emb(x, torch.polar(c, c), c)),
        (r"sin: got dtype torch.complex64", lambda x, c: apply_rotary_emb_torch(x, c[:5], torch.polar(c, c)[:5])),
        (r"x: got None, expected a tensor", lambda x, c: apply_rotary_emb(None, c, c)),
        (r"qkv: got None, expected a tensor", lambda x, c: apply_rotary_emb_qkv_(None, c, c)),
        (r"kv: got None, expected a tensor", lambda x, c: apply_rotary_emb_kv_(None, c, c)),
        (r"sin: got shape \(6, 3\), expected cos' shape \(6, 4\)", lambda x, c: apply_rotary_emb(x, c, c[:, :3])),
        (r"cos: got 6 positions, expected at least 7", lambda x, c: apply_rotary_emb(x, c, c, seqlen_offsets=2)),
        (r"cos: got 4 positions, expected at least 5", lambda x, c: apply_rotary_emb(x, c[:4], c[:4], seqlen_offsets=ints(0, 0))),
        (r"seqlen_offsets: got shape \(3,\), expected \(2,\)", lambda x, c: apply_rotary_emb(x, c, c, seqlen_offsets=ints(0, 0, 0))),
        (r"seqlen_offsets: got -3, expected an int, 0 or more", lambda x, c: apply_rotary_emb(x, c, c, seqlen_offsets=-3)),
        (r"seqlen_offsets: got 1.0, expected an int", lambda x, c: apply_rotary_emb(x, c, c, seqlen_offsets=1.0)),
        (r"seqlen_offsets: got dtype torch.float32", lambda x, c: apply_rotary_emb(x, c, c, seqlen_offsets=torch.ones(2))),
        (r"x: got dtype torch.int64, expected a floating-point", lambda x, c: apply_rotary_emb(x.long(), c, c)),
        (r"x: got dtype torch.int64", lambda x, c: apply_rotary_emb_torch(x.long(), c[:5], c[:5])),
        (r"dim: got 7, expected an even number", lambda x, c: RotaryEmbedding(7)),
        (r"dim: got -2, expected an even number", lambda x, c: RotaryEmbedding(-2)),
        (r"seqlen_offset: got -9, expected an int", lambda x, c: RotaryEmbedding(8)(x[:, :, None], seqlen_offset=-9)),
        (r"seqlen_offset: got 0.5, expected an int", lambda x, c: RotaryEmbedding(8)(x[:, :, None], seqlen_offset=0.5)),
        (r"qkv: got shape \(2, 5, 2, 8\) with num_heads_q=None", lambda x, c: apply_rotary_emb_qkv_(x, c, c)),
        (r"qkv: got shape \(2, 5, 2, 8\) with num_heads_q=1", lambda x, c: apply_rotary_emb_qkv_(x, c, c, num_heads_q=1)),
        (r"kv: got shape \(2, 5, 2, 8\)", lambda x, c: apply_rotary_emb_kv_(x, c, c)),
        (r"x: got shape \(5, 2, 8\), expected \(batch, seqlen", lambda x, c: apply_rotary_emb_torch(x[0], c, c)),
        (r"cos: got shape \(6, 4\), expected \(5, rotary_dim / 2\) or \(2, 5,", lambda x, c: apply_rotary_emb_torch(x, c, c)),
        (r"cos: got shape \(5, 5\)", lambda x, c: apply_rotary_emb_torch(x, torch.ones(5, 5), torch.ones(5, 5))),
        (r"sin: got shape \(6, 4\), expected cos' shape \(5, 4\)", lambda x, c: apply_rotary_emb_torch(x, c[:5], c)),
    ],
)
def test_rotary_errors(message, call):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(2, 5, 2, 8), torch.ones(6, 4))
