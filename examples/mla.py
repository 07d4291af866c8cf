"""Multi-head latent attention (MLA): a DeepSeek-V2 layer of Hugging Face, expanded and absorbed. Both outputs must agree.

    python examples/mla.py    (in a checkout: PYTHONPATH=python .venv/bin/python examples/mla.py)

A latent is a token's compressed keys and values: 512 columns, and 64 of a rotated key. Expanded, as transformers computes it, each
head projects latents to keys of 192 columns and values of 128: for prompts and training. Absorbed, the projection moves to the query
and the output, so that all heads attend to the latents. A paged cache holds one latent per token: for generation.
"""

import torch
from torch import Tensor
from transformers import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding, apply_rotary_emb

import volta_fa.transformers  # noqa: F401  registers the name
from volta_fa import flash_mla

PAGE = 64


class LatentCache:
    """A paged cache of latents (512 columns) with rotated keys (64). The table maps each sequence's pages to shuffled pages of memory."""

    def __init__(self, batch: int, pages: int, like: Tensor):
        self.latents = torch.empty(batch * pages, PAGE, 1, 576, dtype=like.dtype, device=like.device)
        self.table = torch.randperm(batch * pages, device=like.device).int().view(batch, pages)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=like.device)

    def append(self, latents: Tensor):
        """Appends (batch, tokens, 576) after the sequences' tokens, which have equal lengths here."""
        position = self.lengths.long()[:, None] + torch.arange(latents.shape[1], device=latents.device)
        self.latents[self.table.gather(1, position // PAGE).long(), position % PAGE, 0] = latents
        self.lengths += latents.shape[1]


def absorbed(layer: DeepseekV2Attention, hidden_states: Tensor, freqs_cis: Tensor, cache: LatentCache) -> Tensor:
    """Returns what `layer` computes for these tokens, which follow those in the cache, and appends them to it."""
    batch, tokens = hidden_states.shape[:2]
    rank, rotary, nope = layer.kv_lora_rank, layer.qk_rope_head_dim, layer.qk_nope_head_dim
    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden_states))).view(batch, tokens, -1, nope + rotary)
    latent, k_pe = layer.kv_a_proj_with_mqa(hidden_states).split([rank, rotary], -1)
    q_pe, k_pe = apply_rotary_emb(q[..., nope:].transpose(1, 2), k_pe[:, None], freqs_cis)
    cache.append(torch.cat((layer.kv_a_layernorm(latent), k_pe[:, 0]), -1))
    # (nheads, nope + v, rank): a head's keys and values are linear in the latent. Below, b: batch, t: token, h: head; columns of d: a key,
    # r: a latent, v: a value
    of_keys, of_values = layer.kv_b_proj.weight.view(layer.num_heads, -1, rank).split([nope, layer.v_head_dim], 1)
    q = torch.cat((torch.einsum("bthd,hdr->bthr", q[..., :nope], of_keys), q_pe.transpose(1, 2)), -1)
    metadata, num_splits = flash_mla.get_mla_metadata(cache.lengths, tokens * layer.num_heads, num_heads_k=1)
    out, _ = flash_mla.flash_mla_with_kvcache(
        q, cache.latents, cache.table, cache.lengths, rank, metadata, num_splits, softmax_scale=layer.scaling, causal=True
    )
    return layer.o_proj(torch.einsum("bthr,hvr->bthv", out, of_values).flatten(2))


@torch.no_grad()
def main():
    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    config = DeepseekV2Config(hidden_size=256, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=64)
    config._attn_implementation = "volta_fa"
    torch.manual_seed(0)
    layer = DeepseekV2Attention(config, layer_idx=0).to(device, dtype).eval()
    rotary = DeepseekV2RotaryEmbedding(config).to(device)

    batch, prompt, generated = 2, 150, 5
    hidden_states = torch.randn(batch, prompt + generated, config.hidden_size, device=device, dtype=dtype)
    freqs_cis = rotary(hidden_states, torch.arange(prompt + generated, device=device).expand(batch, -1))
    expected, _ = layer(hidden_states, position_embeddings=freqs_cis)

    cache = LatentCache(batch, pages=3, like=hidden_states)
    # calls: the prompt, single tokens, then two at once
    pieces = [slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, prompt + generated - 2)), slice(-2, None)]
    found = torch.cat([absorbed(layer, hidden_states[:, piece], freqs_cis[:, piece], cache) for piece in pieces], 1)
    error = (found - expected).abs().max().item() / expected.abs().max().item()
    print(f"prompt of {prompt} tokens, {generated} generated: absorbed and expanded differ by {error:.1e} of the largest output")
    assert error < (1e-4 if dtype == torch.float32 else 1e-2)
    print(f"the cache holds {576 * hidden_states.element_size()} bytes a token; keys and values of {layer.num_heads} heads were "
          f"{(192 + 128) * layer.num_heads * hidden_states.element_size()}")  # fmt: skip


if __name__ == "__main__":
    main()
