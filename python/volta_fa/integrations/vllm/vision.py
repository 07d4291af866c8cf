"""Attention of vLLM's vision encoders, registered with VOLTA_FA_VLLM_VISION=1 as vLLM lets plugins replace its operators.

vLLM's own `--mm-encoder-attn-backend TORCH_SDPA` waits for the device, cuts the images apart and calls
`scaled_dot_product_attention` for each. This class makes it one call of packed sequences, without waiting."""

import torch
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention

from .paged import attend_packed, is_batch_invariant  # attention of packed sequences; whether VLLM_BATCH_INVARIANT is set


class VoltaMMEncoderAttention(MMEncoderAttention):
    """vLLM's layer, whose backend TORCH_SDPA is `volta_fa::fwd`. Other backends are vLLM's."""

    def _forward_sdpa(self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Returns attention within each image, in the layout of the query.

        Args:
            query, key, value: (batch, seqlen, hidden) or (batch, seqlen, nheads, headdim).
            cu_seqlens: integers (images + 1), where each image begins; then batch is 1. None: each entry of the batch is one image.
        """
        q, k, v = (t.reshape(*t.shape[:2], -1, self.head_size) for t in (query, key, value))
        options = {"softmax_scale": self.scale, "batch_invariant": is_batch_invariant()}
        if cu_seqlens is None:
            out, _, _ = torch.ops.volta_fa.fwd(q, k, v, **options)
            return out.view_as(query)
        starts = cu_seqlens.to(q.device, torch.int32)
        # q.shape[1], all tokens, as max_seqlen: the longest image's length is on the device. Thread blocks past an image's end do nothing.
        out, _ = attend_packed(q[0], k[0], v[0], starts, q.shape[1], **options)
        return out.view_as(query)


def register() -> None:
    """Makes vLLM build this class for its vision encoders. May be called any number of times."""
    from vllm.model_executor.custom_op import op_registry_oot

    if op_registry_oot.get(MMEncoderAttention.__name__) is not VoltaMMEncoderAttention:
        CustomOp.register_oot(VoltaMMEncoderAttention, name=MMEncoderAttention.__name__)
