"""A paged KV cache for transformers models, on volta_fa's operator: what chat.py and speculative.py run on."""

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import volta_fa  # noqa: F401  registers torch.ops.volta_fa

NAME = "volta_fa_pages"


class PagedCache:
    """Keys and values of `batch` sequences in pages that they take as they grow, from a pool that all share."""

    def __init__(self, model: PreTrainedModel, batch: int, pages: int, page_size: int = 16):
        config, weight = model.config, model.get_input_embeddings().weight
        headdim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # keys and values of a page side by side: any strides will do
        shape = (config.num_hidden_layers, pages, 2, page_size, config.num_key_value_heads, headdim)
        self.storage = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self.free = list(range(pages))
        self.page_size = page_size
        self.table = torch.full((batch, pages), -1, dtype=torch.int32, device=weight.device)
        self.taken = [0] * batch
        self.lengths = [0] * batch  # tokens that count; what a step wrote behind them does not exist
        model.set_attn_implementation(NAME)
        model.pages = self

    def step(self, model: PreTrainedModel, tokens: Tensor, sequences: list[int] | None = None) -> Tensor:
        """Logits (sequences, n, vocabulary) of n more tokens (sequences, n) of these sequences, or of all. Their keys and values are in the
        cache then, behind `lengths`: the caller moves these on by the tokens that it keeps."""
        n = tokens.shape[1]
        sequences = list(range(len(self.lengths))) if sequences is None else sequences
        for b in sequences:
            while self.taken[b] * self.page_size < self.lengths[b] + n:
                self.table[b, self.taken[b]] = self.free.pop()
                self.taken[b] += 1
        lengths = torch.tensor([self.lengths[b] for b in sequences], dtype=torch.int32).to(tokens.device, non_blocking=True)
        self.now = {"cache_seqlens": lengths, "block_table": self.table[sequences]}
        positions = lengths[:, None] + torch.arange(n, device=tokens.device)
        return model(tokens, position_ids=positions, use_cache=False).logits

    def release(self, b: int, length: int = 0) -> None:
        """Forget what a sequence has beyond `length` tokens, and give its pages back."""
        self.lengths[b] = length
        while (self.taken[b] - 1) * self.page_size >= length and self.taken[b] > 0:
            self.taken[b] -= 1
            self.free.append(int(self.table[b, self.taken[b]]))
            self.table[b, self.taken[b]] = -1


def attention(module, query, key, value, attention_mask, scaling=None, **_):
    """Appends the new keys and values to their sequences' pages, and attends to all that are there, in one call."""
    pages = module.pages_of()
    k_cache, v_cache = pages.storage[module.layer_idx].unbind(1)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out, _ = torch.ops.volta_fa.fwd_kvcache(q, k_cache, v_cache, k, v, **pages.now, softmax_scale=scaling, is_causal=True)
    return out, None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, lambda **_: None)


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Lets each attention layer find the cache that the model has at the moment."""
    for layer in model.model.layers:
        layer.self_attn.pages_of = lambda: model.pages
    return model.eval()


def tiny_model(device: str) -> PreTrainedModel:
    """Random weights, bytes as tokens: says nothing, but runs anywhere and downloads nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=4096,
    )  # fmt: skip
    return prepare(LlamaForCausalLM(config).to(device, torch.float16 if device == "cuda" else torch.float32))
