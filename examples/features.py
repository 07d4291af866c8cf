"""Packed sequences, attention sinks and ALiBi through torch.ops, against the formula written out.

    python examples/features.py              (in a checkout: PYTHONPATH=python .venv/bin/python examples/features.py)

Packed: sequences of different lengths follow each other in one tensor without padding, and `cu_seqlens` holds their first rows.
A sink is an additional logit per head without a value. An ALiBi slope times the distance of query and key is subtracted from scores.
docs/reference/options.md lists the other features.
"""

import torch
import torch.nn.functional as F

import volta_fa  # noqa: F401  registers the op


def formula(q, k, v, sinks=None, slopes=None):
    """Causal attention in one sequence, (seqlen, nheads, headdim)."""
    nheads, seqlen = q.shape[1], q.shape[0]
    q, k, v = (t.repeat_interleave(nheads // t.shape[1], 1).transpose(0, 1) for t in (q, k, v))
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    i = torch.arange(seqlen, device=q.device)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (i[:, None] - i).abs()
    scores = scores.masked_fill(i[:, None] < i, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, seqlen, 1)], -1)
    p = scores.softmax(-1)[..., :seqlen]  # with sinks, probabilities of the keys add up to less than 1
    return (p @ v).transpose(0, 1)


def check(what: str, found, expected, inputs, dout, tolerance):
    found_gradients, expected_gradients = (torch.autograd.grad(out, inputs, dout.to(out.dtype)) for out in (found, expected))
    for a, b in zip((found, *found_gradients), (expected, *expected_gradients), strict=True):
        torch.testing.assert_close(a.float(), b.float(), **tolerance)
    print(f"{what}: out and gradients agree")


def main():
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.float16) if cuda else ("cpu", torch.float32)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if cuda else {"rtol": 1e-4, "atol": 1e-5}
    torch.manual_seed(0)
    lengths = (13, 40, 1, 27)
    # (total tokens, nheads, headdim); two query heads share a head of k and v
    q, k, v = (torch.randn(sum(lengths), nheads, 32, device=device, dtype=dtype, requires_grad=True) for nheads in (4, 2, 2))
    dout = torch.randn_like(q)
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0], device=device, requires_grad=True)
    slopes = 2.0 ** -torch.arange(2, 10, 2, device=device)  # fp32; without a gradient

    cu_seqlens = F.pad(torch.tensor(lengths, device=device).cumsum(0), (1, 0)).int()
    packed = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths), is_causal=True)

    def one_by_one(**features):
        sequences = zip(*(t.float().split(lengths) for t in (q, k, v)), strict=True)
        return torch.cat([formula(*sequence, **features) for sequence in sequences])

    out, softmax_lse, _rng_state = torch.ops.volta_fa.fwd(q, k, v, **packed)
    assert softmax_lse.shape == (4, sum(lengths))
    check("packed sequences", out, one_by_one(), (q, k, v), dout, tolerance)
    # also the first sequence by PyTorch's own attention
    q0, k0, v0 = (t[: lengths[0]].detach().transpose(0, 1)[None].float() for t in (q, k, v))
    theirs = F.scaled_dot_product_attention(q0, k0, v0, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(out[: lengths[0]].detach().float(), theirs, **tolerance)

    out = torch.ops.volta_fa.fwd(q, k, v, **packed, sinks=sinks)[0]
    check("with sinks", out, one_by_one(sinks=sinks), (q, k, v, sinks), dout, tolerance)
    out = torch.ops.volta_fa.fwd(q, k, v, **packed, alibi_slopes=slopes)[0]
    check("with ALiBi", out, one_by_one(slopes=slopes), (q, k, v), dout, tolerance)
    out = torch.ops.volta_fa.fwd(q, k, v, **packed, alibi_slopes=slopes, sinks=sinks)[0]
    check("with both", out, one_by_one(slopes=slopes, sinks=sinks), (q, k, v, sinks), dout, tolerance)


if __name__ == "__main__":
    main()
