"""Attention over sequences that are sharded over GPUs: context parallelism on torch.distributed.

    from volta_fa.distributed import ring_attention, shard_sequence

    q, k, v = (shard_sequence(t, group) for t in (q, k, v))     # or made from sharded tokens
    out = ring_attention(q, k, v, group, is_causal=True)        # this rank's shard of the result

- `ring_attention` sends keys and values from rank to rank, and queries stay (Ring Attention, arXiv 2310.01889).
- `ulysses_attention` exchanges heads for positions by all-to-all (DeepSpeed-Ulysses, arXiv 2309.14509).
- `context_parallel_attention` combines both on a mesh of two dimensions: rings along the first, Ulysses along the second.

They use PyTorch's process groups and DeviceMesh: NCCL on GPUs, gloo on CPUs. docs/guides/context-parallel.md derives their cost."""

from .attention import context_parallel_attention, ring_attention, shard_sequence, ulysses_attention, unshard_sequence

__all__ = ["context_parallel_attention", "ring_attention", "shard_sequence", "ulysses_attention", "unshard_sequence"]
