"""Runs one job (jobs.py) in one vLLM engine: python engine.py JOB.json RESULT.json MODELS. run.py starts it.

Writes the tokens of all prompts, twice (the second time vLLM's prefix cache has them), with log-probabilities of the best two tokens
of each step. For an encoder, writes the errors of its embeddings against transformers in float32. Models are small and random (models.py).

A job is a dictionary: name; kind, tokens or encoder; model, a folder in MODELS; backend, vLLM's attention backend. It may have engine
(arguments of vllm.LLM), prompts (see `prompts`, or images), logprobs (False: none), lora (True: every other prompt uses the adapter
MODELS/lora) and refused (part of the error with which vLLM must refuse the job). run.py reads version, env and gpus."""

import json
import random
import sys
import time
from pathlib import Path

import torch
from jobs import COUNTS  # names of vLLM's counters
from PIL import Image

#: As in models.py: the number of tokens. FIRST_IMAGE_TOKEN and those after it stand for images.
VOCABULARY, FIRST_IMAGE_TOKEN = 4096, 4088
#: Tokens of prompts: below, at and above vLLM's block sizes, kernels' tiles and the limit of a step's tokens (2,048).
LENGTHS = [5, 6, 15, 16, 17, 31, 33, 64, 65, 100, 127, 128, 129, 200, 255, 257, 300, 400, 511, 513, 700, 900, 1023, 1025, 1300]
LENGTHS += [1600, 2000, 2047, 2049, 2500, 2999, 3000]
#: Tokens of a prompt that stand for an image, counted from FIRST_IMAGE_TOKEN (IMAGE_TOKENS of models.py): Gemma 3's <start_of_image>;
#: Gemma 4's <|image|>; Qwen's <|vision_start|>, <|image_pad|> and <|vision_end|>; Molmo 2's <|image|>, after the vocabulary. PaliGemma has
#: none: vLLM puts an image before the prompt.
IMAGE_MARKS = {"gemma3": [0], "gemma4": [1], "qwen3-vl": [0, 1, 3], "paligemma2": [], "molmo2": [8]}
ENCODER_LENGTHS = [4, 5, 17, 63, 64, 100, 200, 300, 500]


def prompts(kind: str) -> tuple[list[list[int]], int]:
    """Returns prompts, and the number of new tokens of each.

    Kinds: `mixed` lengths, where some begin with the same 512 tokens; `repeated`, the same lengths with a text that repeats itself;
    `long`: short prompts with many new tokens; `longer`: the same across a page of 800 tokens."""
    rng = random.Random(7)

    def text(length):
        return [rng.randrange(3, VOCABULARY) for _ in range(length)]

    if kind in ("long", "longer"):
        first = 100 if kind == "long" else 560
        return [text(first + 13 * i) for i in range(24)], 256
    common, found = text(512), []
    for i, length in enumerate(LENGTHS):
        words = text(length)
        if kind == "repeated":
            words = (words[: max(5, length // 8)] * 9)[:length]
        elif i % 4 == 3 and length > 600:
            words[:512] = common
        found.append(words)
    return found, 64


def image_prompts(model: str) -> list[dict]:
    """Returns prompts with one to three images of several sizes; one for PaliGemma, which takes no more. The second differs from the first
    by its image alone."""
    rng, generator = random.Random(7), torch.Generator().manual_seed(7)
    mark = [FIRST_IMAGE_TOKEN + i for i in IMAGE_MARKS[model]]

    def image(width, height):
        """Returns an image of 8x6 random colors, smoothed to this size in pixels."""
        colors = torch.randint(0, 256, (6, 8, 3), generator=generator, dtype=torch.uint8)
        return Image.fromarray(colors.numpy()).resize((width, height), Image.Resampling.BICUBIC)

    found = []
    for i, length in enumerate([20, 20, 5, 64, 130, 300, 513, 700, 1000, 1500, 40, 900]):
        images = [image(64 + 32 * ((5 * i + 3 * k) % 17), 64 + 32 * ((7 * i + k) % 15)) for k in range(1 + i % 3 if mark else 1)]
        words = [rng.randrange(3, FIRST_IMAGE_TOKEN) for _ in range(length)]
        for k in range(len(images)):
            at = length * k // len(images) + k * len(mark)
            words[at:at] = mark
        found.append({"prompt_token_ids": words, "multi_modal_data": {"image": images}})
    found[1]["prompt_token_ids"], found[1]["multi_modal_data"] = found[0]["prompt_token_ids"], {"image": [image(64, 64)]}
    return found


def start(job: dict, models: Path, **options):
    """Returns the engine of a job. `options` are arguments of vllm.LLM; the job's own override them."""
    import molmo2  # noqa: F401, which registers what older transformers lack
    import vllm.config.model as limits
    from vllm import LLM

    limits._FLOAT16_NOT_SUPPORTED_MODELS.clear()  # vLLM refuses float16 for Gemma 2 and 3, whose real weights overflow
    # vLLM starts only if the share gpu_memory_utilization of the GPU is free. It is small here, because engines share the GPU.
    defaults = {"dtype": "float16", "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.05}
    defaults |= {"seed": 0, "disable_log_stats": True, "attention_backend": job["backend"]}
    return LLM(model=str(models / job["model"]), **defaults | options | job.get("engine", {}))


def run_tokens(job: dict, models: Path) -> dict:
    """Generates greedily, twice. Returns both rounds, a model's prompts with images expanded, and the counters of jobs.COUNTS. By prompt, a
    round has tokens and, of each step, the best two log-probabilities (nats); `cached`: all prompt tokens from the prefix cache."""
    from vllm import SamplingParams

    with_images = job.get("prompts") == "images"
    # the most images of a prompt: PaliGemma, without a mark, takes one
    limits = {"limit_mm_per_prompt": {"image": 3 if IMAGE_MARKS[job["model"]] else 1, "video": 0}} if with_images else {}
    llm = start(job, models, max_model_len=4096, max_num_seqs=32, skip_tokenizer_init=not with_images, **limits)
    texts, new = ([], 64) if with_images else prompts(job.get("prompts", "mixed"))
    inputs = image_prompts(job["model"]) if with_images else [{"prompt_token_ids": text} for text in texts]
    logprobs = 2 if job.get("logprobs", True) else None
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs)
    options = {}
    if job.get("lora"):
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest("adapter", 1, str(models / "lora"))  # 1: its id
        options["lora_request"] = [adapter if i % 2 else None for i in range(len(inputs))]
    rounds = []
    for _ in range(2):
        begin = time.time()
        outputs = llm.generate(inputs, params, use_tqdm=False, **options)
        found = {"seconds": time.time() - begin, "cached": sum(o.num_cached_tokens or 0 for o in outputs)}
        found["tokens"] = [list(o.outputs[0].token_ids) for o in outputs]
        if logprobs:
            steps = [[sorted((x.logprob for x in step.values()), reverse=True)[:2] for step in o.outputs[0].logprobs] for o in outputs]
            found["logprobs"] = steps
        rounds.append(found)
    result = {"rounds": rounds}
    if with_images:
        result["prompts"] = [list(o.prompt_token_ids) for o in outputs]
    if not job.get("engine", {}).get("disable_log_stats", True):
        counts = {m.name.removeprefix("vllm:"): m.value for m in llm.get_metrics() if hasattr(m, "value")}
        result["counts"] = {name: counts[name] for name in COUNTS if name in counts}
    return result


def run_encoder(job: dict, models: Path) -> dict:
    """Returns the errors of embeddings against transformers in float32, and the least distance of two of these. Embeddings have norm 1."""
    from transformers import BertModel

    llm = start(job, models, runner="pooling", enforce_eager=True)
    rng = random.Random(1)
    texts = [[rng.randrange(3, VOCABULARY) for _ in range(n)] for n in ENCODER_LENGTHS]
    outputs = llm.embed([{"prompt_token_ids": text} for text in texts], use_tqdm=False)
    found = torch.tensor([o.outputs.embedding for o in outputs])
    model = BertModel.from_pretrained(models / job["model"], dtype=torch.float32, attn_implementation="eager").cuda().eval()
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([text], device="cuda")).last_hidden_state[:, 0] for text in texts])
    expected = torch.nn.functional.normalize(expected, dim=-1).cpu()
    others = (expected - expected.roll(1, 0)).norm(dim=-1)
    return {"errors": (found - expected).norm(dim=-1).tolist(), "distance_between_texts": others.min().item()}


def main() -> None:
    """Runs the job, and writes its result or its error."""
    begin, job = time.time(), json.loads(Path(sys.argv[1]).read_text())
    try:
        result = {"tokens": run_tokens, "encoder": run_encoder}[job["kind"]](job, Path(sys.argv[3]))
    except Exception as error:
        if job.get("refused", "\0") not in str(error):  # no error has "\0"
            raise
        result = {"refused": str(error)}
    result |= {"name": job["name"], "seconds": time.time() - begin}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
