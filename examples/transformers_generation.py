"""Generating text with a Hugging Face model on volta_fa: beam search, a static cache, and a quantized one.

    python examples/transformers_generation.py    (in a checkout: PYTHONPATH=python .venv/bin/python examples/transformers_generation.py)

A small Mistral with random weights, prompts of different lengths, and the tokens that eager attention gives.
examples/transformers_llama.py shows logits, greedy generation and training.
"""

import copy

import torch
from transformers import MistralConfig, MistralForCausalLM

from volta_fa.transformers import QuantizedCache  # importing the module registers the name

WAYS = {
    "greedy": {},
    "beam search": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"},
    "beam search, static cache": {"num_beams": 3, "cache_implementation": "static"},
}


def main():
    # Without a GPU, generate() does not compile the step with a static cache. With one, it compiles for a minute.
    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    config = MistralConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        sliding_window=16,
    )  # fmt: skip
    torch.manual_seed(0)
    # a copy each: the configuration says which attention is used
    eager = MistralForCausalLM._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    for parameter in eager.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(5)  # random weights are so small that the next token would not depend on attention
    model = MistralForCausalLM._from_config(config, attn_implementation="volta_fa").eval()
    model.load_state_dict(eager.state_dict())
    eager.to(device)  # in fp32: the standard
    model.to(device, dtype)

    prompts = torch.randint(3, 256, (3, 20), device=device)
    attention_mask = torch.ones_like(prompts)
    attention_mask[0, :7] = attention_mask[1, :2] = 0  # padding on the left
    options = {"input_ids": prompts, "attention_mask": attention_mask, "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    for name, how in WAYS.items():
        found, expected = (m.generate(**options, **how)[:, 20:] for m in (model, eager))
        same = (found == expected).float().mean().item()
        print(f"{name}: {same:.0%} of the tokens are eager's")
        # in fp16 two tokens can be so close to each other that rounding decides, and what follows is another text
        assert same == 1 if dtype == torch.float32 else same > 0.5
    for kv_dtype in ("int8", "int4"):
        cache = QuantizedCache(config, kv_dtype)
        found = model.generate(**options, past_key_values=cache)[:, 20:]
        same = (found == expected).float().mean().item()  # what follows one other token is another text
        keys, _ = cache.layers[0].stored
        print(f"a cache in {kv_dtype}: {same:.0%} of the tokens are eager's, a layer's keys {keys.data.dtype} {tuple(keys.data.shape)}")


if __name__ == "__main__":
    main()
