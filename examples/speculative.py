"""Speculative decoding: several guessed tokens of every sequence are verified in one step over a paged KV cache.

The guess is what followed the last time that the sequence's last two tokens stood there (prompt lookup): no second model. A step has the
last token and the guesses as its queries, so it gives what greedy decoding would have said at each of them: the guesses before the
first wrong one stay, and one token more. What was appended for wrong ones lies behind the sequence's length and does not exist.

    python examples/speculative.py
"""

import torch
from paged_cache import PagedCache, tiny_model

GUESSES, TOKENS = 4, 48
device = "cuda" if torch.cuda.is_available() else "cpu"
model = tiny_model(device)
prompts = [b"one two three one two three one two", b"a rose is a rose is a rose"]


def start(cache: PagedCache) -> list[list[int]]:
    """The prompts, and the first token after each."""
    sequences: list[list[int]] = []
    for b, prompt in enumerate(prompts):
        # one after the other: their lengths differ
        logits = cache.step(model, torch.tensor([list(prompt)], device=device), [b])
        cache.lengths[b] = len(prompt)
        sequences.append([*prompt, int(logits[0, -1].argmax())])
    return sequences


def guess(tokens: list[int]) -> list[int]:
    """What followed these last two tokens before."""
    for i in range(len(tokens) - 3, 0, -1):
        if tokens[i - 1 : i + 1] == tokens[-2:]:
            return (tokens[i + 1 : i + 1 + GUESSES] + [0] * GUESSES)[:GUESSES]
    return [0] * GUESSES


def decode(guesses: int) -> tuple[list[list[int]], int]:
    """Each prompt with TOKENS tokens more, and the steps that took."""
    cache = PagedCache(model, batch=len(prompts), pages=64)
    sequences, steps = start(cache), 0
    ends = [len(prompt) + TOKENS for prompt in prompts]
    while any(len(tokens) < end for tokens, end in zip(sequences, ends)):
        drafts = [guess(tokens)[:guesses] for tokens in sequences]
        logits = cache.step(model, torch.tensor([[tokens[-1], *draft] for tokens, draft in zip(sequences, drafts)], device=device))
        steps += 1
        for b, (tokens, draft, said) in enumerate(zip(sequences, drafts, logits.argmax(-1).tolist())):
            right = next((i for i, (a, s) in enumerate(zip(draft, said)) if a != s), guesses)
            tokens += said[: right + 1]
            cache.release(b, len(tokens) - 1)
    return [tokens[:end] for tokens, end in zip(sequences, ends)], steps


with torch.inference_mode():
    plain, plain_steps = decode(0)
    speculative, steps = decode(GUESSES)
print(f"one token a step: {plain_steps} steps; with {GUESSES} guesses: {steps} steps")
print("the same tokens" if plain == speculative else "other tokens: rounding decided between two that are as likely")
