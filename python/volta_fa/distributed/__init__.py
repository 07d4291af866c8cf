"""Attention over sequences that are sharded over GPUs: context parallelism on torch.distributed.

    from volta_fa.distributed import ring_attention, shard_sequence

    q, k, v = (shard_sequence(t, group) for t in (q, k, v))     # or made from sharded tokens
    out = ring_attention(q, k, v, group, is_causal=True)        # this rank's shard of the result

ring_attention sends keys and values past the queries, ulysses_attention exchanges heads for positions, and
context_parallel_attention does the one between, the other inside, the places of a mesh of two dimensions. PyTorch's process groups
and DeviceMesh are the engine: NCCL on GPUs, gloo on CPUs. docs/guides/context-parallel.md derives what it costs and when that hides.
"""

from .attention import context_parallel_attention, ring_attention, shard_sequence, ulysses_attention, unshard_sequence

__all__ = ["context_parallel_attention", "ring_attention", "shard_sequence", "ulysses_attention", "unshard_sequence"]
