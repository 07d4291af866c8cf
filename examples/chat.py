"""A chat without a server: one conversation in a paged KV cache (paged_cache.py). Each turn computes only the tokens that it adds.

python examples/chat.py --model Qwen/Qwen2.5-0.5B-Instruct     # any Llama-like model of transformers
python examples/chat.py --say hello --say "and again"          # random weights, no download: shows the cache at work
"""

import argparse

import torch
from paged_cache import PagedCache, prepare, tiny_model  # prepare(): lets a model's attention layers find its cache

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="of the Hugging Face hub, or a folder; a tiny one with random weights unless given")
parser.add_argument("--say", action="append", help="what to say, instead of reading lines; may be repeated")
parser.add_argument("--tokens", type=int, default=64, help="the longest answer")
parser.add_argument("--pages", type=int, default=512, help="of 16 tokens each")
arguments = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"

if arguments.model:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    dtype = torch.float16 if device == "cuda" else torch.float32
    model = prepare(AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).to(device))
    end = tokenizer.eos_token_id

    def encode(messages: list[dict[str, str]]) -> list[int]:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    decode = tokenizer.decode
else:
    model, end = tiny_model(device), None

    def encode(messages: list[dict[str, str]]) -> list[int]:
        return list("".join(f"{m['role']}: {m['content']}\n" for m in messages).encode("latin1") + b"assistant: ")

    def decode(tokens: list[int]) -> str:
        return bytes(tokens).decode("latin1")


def lines():
    """Yields what the user says: --say, or lines of the terminal until its end."""
    if arguments.say:
        yield from arguments.say
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            return


cache = PagedCache(model, batch=1, pages=arguments.pages)
messages: list[dict[str, str]] = []
history: list[int] = []  # the tokens whose keys and values are in the cache
with torch.inference_mode():
    for line in lines():
        messages.append({"role": "user", "content": line})
        prompt = encode(messages)
        # A chat template may change the text of the last answer. The cache keeps the common prefix; at least one token is computed.
        common = next((i for i, (a, b) in enumerate(zip(history, prompt)) if a != b), min(len(history), len(prompt) - 1))
        cache.release(0, common)  # of sequence 0, the only one, the first `common` tokens stay
        new, answer = prompt[common:], []
        print(f"[{len(prompt)} tokens, {common} of them in the cache, {arguments.pages - len(cache.free)} pages]")  # free: the unused ones
        while len(answer) < arguments.tokens:
            logits = cache.step(model, torch.tensor([new], device=device))  # writes the keys and values of `new` to the pages
            cache.lengths[0] += len(new)  # keeps them: attention ignores what lies after `lengths`
            token = int(logits[0, -1].argmax())
            if token == end:
                break
            answer.append(token)
            new = [token]
        history = (prompt + answer)[: cache.lengths[0]]
        text = decode(answer)
        messages.append({"role": "assistant", "content": text})
        print(text if arguments.model else f"{len(answer)} tokens of a model with random weights")
