"""A Hugging Face model, one argument changed: its attention runs volta_fa in generation and in training.

    python examples/transformers_models.py    (in a checkout: PYTHONPATH=python .venv/bin/python examples/transformers_models.py)

A small Mistral with random weights, without a download. Compared with eager attention: logits, and the tokens of greedy generation, beam
search, a static cache and quantized ones. Then a packed training step. `calls` counts volta_fa::fwd. Without a GPU it runs on the CPU.
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


def count_attention(f):
    """Returns what f returns, and how often it called volta_fa::fwd, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        result = f()
    return result, sum(event.name == "volta_fa::fwd" and event.cpu_parent is None for event in profiler.events())


def main():
    # Without a GPU, generate() does not compile the step with a static cache. With one, it compiles for a minute.
    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    config = MistralConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        sliding_window=16,
    )  # fmt: skip
    torch.manual_seed(0)
    # Each model gets its own configuration, which holds the attention implementation.
    eager = MistralForCausalLM._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    for parameter in eager.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(5)  # with smaller random weights the next token would not depend on attention
    # What from_pretrained(name, dtype=torch.float16, attn_implementation="volta_fa") does for weights on disk.
    model = MistralForCausalLM._from_config(config, attn_implementation="volta_fa").eval()
    model.load_state_dict(eager.state_dict())
    eager.to(device)  # in fp32, because its tokens are the expected ones
    model.to(device, dtype)

    prompts = torch.randint(3, 256, (3, 20), device=device)  # three of 20 tokens; ids 0 to 2 are special
    attention_mask = torch.ones_like(prompts)
    attention_mask[0, :7] = attention_mask[1, :2] = 0  # padding on the left
    inputs = {"input_ids": prompts, "attention_mask": attention_mask}
    with torch.no_grad():
        logits, calls = count_attention(lambda: model(**inputs).logits)
        expected = eager(**inputs).logits
        difference = ((logits - expected)[attention_mask.bool()].abs().max() / expected.abs().max()).item()
    print(f"largest difference from eager: {difference:.1e} of the largest logit, {calls} calls in {config.num_hidden_layers} layers")

    options = {**inputs, "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    greedy = eager.generate(**options)[:, 20:]
    for name, how in WAYS.items():
        found, expected = (m.generate(**options, **how)[:, 20:] for m in (model, eager))
        same = (found == expected).float().mean().item()
        print(f"{name}: {same:.0%} of the tokens are eager's")
        # In fp16, rounding decides between tokens of nearly equal logits. All tokens after another choice may differ.
        assert same == 1 if dtype == torch.float32 else same > 0.5
    for kv_dtype in ("int8", "int4"):
        cache = QuantizedCache(config, kv_dtype)
        found = model.generate(**options, past_key_values=cache)[:, 20:]
        same = (found == greedy).float().mean().item()
        keys, _ = cache.layers[0].stored  # the first layer's quantized keys and values
        print(f"a cache in {kv_dtype}: {same:.0%} of the tokens are eager's, a layer's keys {keys.data.dtype} {tuple(keys.data.shape)}")

    # Three sequences in one row without padding. Each starts where position_ids restart at 0, and attends to itself only.
    position_ids = torch.cat([torch.arange(n, device=device) for n in (13, 18, 20)])[None]
    packed = prompts[attention_mask.bool()][None]
    model.train()
    loss, calls = count_attention(lambda: model(input_ids=packed, position_ids=position_ids, labels=packed, use_cache=False).loss)
    loss.backward()
    print(f"packed training step: loss {loss.item():.3f}, {calls} calls")


if __name__ == "__main__":
    main()
