"""Random attention problems: combinations of the options that `volta_fa.check.cases.Case` can ask for."""

from __future__ import annotations

from collections.abc import Callable

from reference import cases

Case = cases.Case
WINDOWS = (-1, -1, 0, 1, 7, 40)
BIASES = ("", "", "bhqk", "hqk", "qk", "bqk", "bk", "hq", "k", "q", "-")
BIAS_TYPES = ("own", "fp32", "bool")


def random_case(pick: Callable, lengths: Callable[[], int], headdims, most_entries=3, most_heads=4) -> Case:
    """A combination of everything. `pick` takes one of a sequence, of which the simplest is first; `lengths` draws one."""
    nheads_k = pick(range(1, most_heads // 2 + 1))
    groups = pick([g for g in range(1, most_heads + 1) if g * nheads_k <= most_heads])
    headdim = pick(headdims)
    entries = pick(range(1, most_entries + 1))
    packed = pick((False, True))
    seqlens = tuple((lengths(), lengths()) for _ in range(entries)) if packed else ((max(lengths(), 1), max(lengths(), 1)),) * entries
    softcap = pick((0.0, 0.0, 1.5, 30.0))
    dims = pick(BIASES)
    is_causal = pick((False, True))
    return Case(
        seqlen_q=0 if packed else seqlens[0][0],
        seqlen_k=0 if packed else seqlens[0][1],
        lengths=seqlens if packed else (),
        batch=2 if packed else entries,
        spare=pick((0, 0, 5)) if packed else 0,
        used=tuple(pick(sorted({k, k // 2, max(k - 1, 0), 0}, reverse=True)) for _, k in seqlens) if pick((False, False, True)) else (),
        headdim=headdim,
        headdim_v=pick((None, None, pick(headdims))),
        nheads=nheads_k * groups,
        nheads_k=nheads_k,
        is_causal=is_causal,
        window_left=pick(WINDOWS),
        window_right=-1 if is_causal else pick(WINDOWS),  # the op refuses is_causal with keys to the right
        softmax_scale=pick((None, None, 0.5, -0.1)),
        softcap=softcap,
        dropout_p=0.0 if softcap else pick((0.0, 0.0, 0.17, 0.5)),
        alibi=pick(("", "", "h", "bh")),
        bias=f"{dims}:{pick(BIAS_TYPES)}" if dims else "",
        sinks=pick(("", "", "own", "fp32")),
    )
