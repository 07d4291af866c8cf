"""A Hugging Face model, one argument changed: its attention runs volta_fa.

    python examples/transformers_llama.py     (in a checkout: PYTHONPATH=python .venv/bin/python examples/transformers_llama.py)

A small Llama with random weights, so that nothing is downloaded. On a machine without a GPU it runs on the CPU.
"""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import volta_fa.transformers  # noqa: F401  registers the name


def count_attention(f):
    """What f returns, and how often it called the op: the profiler sees every call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        result = f()
    return result, sum(event.name == "volta_fa::fwd" and event.cpu_parent is None for event in profiler.events())


def main():
    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    torch.manual_seed(0)
    # a copy each: the configuration says which attention is used
    eager = LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation="eager").to(device, dtype).eval()
    # What from_pretrained(name, dtype=torch.float16, attn_implementation="volta_fa") does for weights on disk.
    model = LlamaForCausalLM._from_config(config, attn_implementation="volta_fa").to(device, dtype).eval()
    model.load_state_dict(eager.state_dict())

    # Three prompts of different lengths, padded on the left.
    prompts = torch.randint(3, 256, (3, 20), device=device)
    attention_mask = torch.ones_like(prompts)
    attention_mask[0, :7] = attention_mask[1, :2] = 0
    inputs = {"input_ids": prompts, "attention_mask": attention_mask}

    with torch.no_grad():
        logits, calls = count_attention(lambda: model(**inputs).logits)
        difference = (logits - eager(**inputs).logits)[attention_mask.bool()].abs().max().item()
    print(f"largest difference from eager: {difference:.1e}, {calls} calls of volta_fa::fwd in {config.num_hidden_layers} layers")

    options = {**inputs, "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    same = torch.equal(model.generate(**options), eager.generate(**options))
    print(f"greedy generation: {'the same tokens' if same else 'other tokens'}")

    # Three sequences without padding between them: position_ids begin anew.
    position_ids = torch.cat([torch.arange(n, device=device) for n in (13, 18, 20)])[None]
    packed = prompts[attention_mask.bool()][None]
    model.train()
    loss, calls = count_attention(lambda: model(input_ids=packed, position_ids=position_ids, labels=packed, use_cache=False).loss)
    loss.backward()
    print(f"packed training step: loss {loss.item():.3f}, {calls} calls")


if __name__ == "__main__":
    main()
