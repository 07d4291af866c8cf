"""A paged KV cache for Llama-like transformers models, on torch.ops.volta_fa.fwd_kvcache. chat.py imports it.

    python examples/paged_cache.py     # speculative decoding over it: several guessed tokens of every sequence are verified in one step

A caller prepares a model with `prepare`, makes a PagedCache, and calls its `step` for logits. The attention function that this module
registers with transformers finds the cache through the model (`model.pages`).
"""

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import volta_fa  # noqa: F401  registers torch.ops.volta_fa

NAME = "volta_fa_pages"


class PagedCache:
    """Keys and values of `batch` sequences. Each takes pages of `page_size` tokens from a shared pool as it grows."""

    def __init__(self, model: PreTrainedModel, batch: int, pages: int, page_size: int = 16):
        config, weight = model.config, model.get_input_embeddings().weight
        headdim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # keys and values of a page are adjacent: the operator accepts any strides but of the last dimension
        shape = (config.num_hidden_layers, pages, 2, page_size, config.num_key_value_heads, headdim)
        self.storage = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self.free = list(range(pages))  # numbers of the pages that no sequence has
        self.page_size = page_size  # tokens
        # the pages of each sequence, in order, then -1
        self.table = torch.full((batch, pages), -1, dtype=torch.int32, device=weight.device)
        self.taken = [0] * batch  # number of pages of each sequence: the first columns of its row in `table`
        self.lengths = [0] * batch  # valid tokens of each sequence; the cache may hold others after them, which attention ignores
        model.set_attn_implementation(NAME)
        model.pages = self  # where `attention` finds it

    def step(self, model: PreTrainedModel, tokens: Tensor, sequences: list[int] | None = None) -> Tensor:
        """Returns logits (sequences, n, vocabulary) for n more tokens (sequences, n) of `sequences`, by default of all. Writes their keys
        and values to the cache after `lengths` tokens. The caller then increases `lengths` by the tokens that it keeps."""
        n = tokens.shape[1]
        sequences = list(range(len(self.lengths))) if sequences is None else sequences
        for b in sequences:
            while self.taken[b] * self.page_size < self.lengths[b] + n:
                self.table[b, self.taken[b]] = self.free.pop()
                self.taken[b] += 1
        lengths = torch.tensor([self.lengths[b] for b in sequences], dtype=torch.int32).to(tokens.device, non_blocking=True)
        self.now = {"cache_seqlens": lengths, "block_table": self.table[sequences]}  # of this step, for `attention`
        positions = lengths[:, None] + torch.arange(n, device=tokens.device)
        return model(tokens, position_ids=positions, use_cache=False).logits

    def release(self, b: int, length: int = 0) -> None:
        """Sets a sequence's length and returns pages that it no longer needs to the pool."""
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
    """Lets each attention layer find the model's current cache. Returns the model in eval mode."""
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


# ---- speculative decoding --------------------------------------------------------------------------------------------
#
# Guesses need no second model (prompt lookup): they repeat what followed an earlier occurrence of the sequence's last two tokens. The
# queries of a step are the last token and the guesses, so it returns the greedy token after each. Guesses before the first wrong one
# stay, plus one token. Keys and values of wrong guesses lie after the sequence's length in the cache, where attention ignores them.

GUESSES, TOKENS = 4, 48
PROMPTS = [b"one two three one two three one two", b"a rose is a rose is a rose"]


def start(model: PreTrainedModel, cache: PagedCache) -> list[list[int]]:
    """Fills the cache with the prompts. Returns each prompt with the first token after it."""
    sequences: list[list[int]] = []
    for b, prompt in enumerate(PROMPTS):
        # one after the other: their lengths differ
        logits = cache.step(model, torch.tensor([list(prompt)], device=cache.table.device), [b])
        cache.lengths[b] = len(prompt)
        sequences.append([*prompt, int(logits[0, -1].argmax())])
    return sequences


def guess(tokens: list[int]) -> list[int]:
    """Returns the GUESSES tokens that followed the latest earlier occurrence of the last two tokens; zeros without one."""
    for i in range(len(tokens) - 3, 0, -1):
        if tokens[i - 1 : i + 1] == tokens[-2:]:
            return (tokens[i + 1 : i + 1 + GUESSES] + [0] * GUESSES)[:GUESSES]
    return [0] * GUESSES


def decode(model: PreTrainedModel, guesses: int) -> tuple[list[list[int]], int]:
    """Returns each prompt with TOKENS more tokens, and the number of steps."""
    cache = PagedCache(model, batch=len(PROMPTS), pages=64)
    sequences, steps = start(model, cache), 0
    ends = [len(prompt) + TOKENS for prompt in PROMPTS]
    while any(len(tokens) < end for tokens, end in zip(sequences, ends)):
        drafts = [guess(tokens)[:guesses] for tokens in sequences]
        logits = cache.step(
            model, torch.tensor([[tokens[-1], *draft] for tokens, draft in zip(sequences, drafts)], device=cache.table.device)
        )
        steps += 1
        for b, (tokens, draft, greedy) in enumerate(zip(sequences, drafts, logits.argmax(-1).tolist())):
            correct = next((i for i, (guessed, token) in enumerate(zip(draft, greedy)) if guessed != token), guesses)
            tokens += greedy[: correct + 1]
            cache.release(b, len(tokens) - 1)  # the last token is the next step's first query
    return [tokens[:end] for tokens, end in zip(sequences, ends)], steps


@torch.inference_mode()
def main():
    """Compares tokens and steps with decoding one token per step."""
    model = tiny_model("cuda" if torch.cuda.is_available() else "cpu")
    plain, plain_steps = decode(model, guesses=0)
    speculative, steps = decode(model, guesses=GUESSES)
    print(f"one token a step: {plain_steps} steps; with {GUESSES} guesses: {steps} steps")
    print("the same tokens" if plain == speculative else "other tokens: rounding decided between two that are as likely")


if __name__ == "__main__":
    main()
