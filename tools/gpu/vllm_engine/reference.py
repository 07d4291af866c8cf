"""Measures the errors of engines' log-probabilities: python reference.py RESULTS MODELS

run.py calls it after the engines, for the folder of each vLLM version; compare.py reads what it writes. Feeds the tokens that an engine
generated to transformers in float32, and compares the log-probability of each. Writes each job's largest error and root mean square, in
nats, to RESULTS/reference.json. Needs peft for jobs with LoRA."""

import json
import math
import sys
from pathlib import Path

import torch
from engine import FIRST_IMAGE_TOKEN, VOCABULARY, image_prompts, prompts  # the prompts that the engines got, with images or without
from molmo2 import Molmo2Reference
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def visible(length: int, device: str | torch.device) -> torch.Tensor:
    """Returns the causal mask, bool (length, length): whether a row's query sees a column's key."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def visible_with_anchors(length: int, anchors: int, window: int) -> torch.Tensor:
    """Returns the same for a query that sees the first `anchors` tokens, and the last `window` up to its own."""
    rows, columns = torch.arange(length, device=DEVICE)[:, None], torch.arange(length, device=DEVICE)
    return visible(length, DEVICE) & ((rows - columns < window) | (columns < anchors))


def additive(mask: torch.Tensor) -> torch.Tensor:
    """Returns a mask, bool (length, length), as transformers takes it: float32 (1, 1, length, length)."""
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]


def mask_of_images(model: str, is_image: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the arguments that tell a model where its images are. is_image: bool (1, tokens)."""
    if model in ("paligemma2", "molmo2"):  # all of PaliGemma's prompt is a prefix to transformers, and the image alone to vLLM
        image = is_image[0]
        number = (image & ~image.roll(1)).cumsum(0) * image  # of the image, from 1
        together = image & (number[:, None] == number)
        return {"attention_mask": additive(visible(len(image), image.device) | together)}
    return {"token_type_ids" if model == "gemma3" else "mm_token_type_ids": is_image.int()}


def load_model(folder: Path, with_images: bool):
    """Returns the model in a folder of models.py, in float32 with eager attention."""
    if folder.name == "molmo2":
        return Molmo2Reference(folder)
    kind = AutoModelForImageTextToText if with_images else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def arguments(name: str, model, ids: torch.Tensor, images: dict | None, anchored: str | None) -> dict:
    """Returns the arguments of a model beside its tokens `ids`, int64 (1, tokens): images and its attention mask.

    images: what the image processor returned for one prompt. anchored: VOLTA_FA_VLLM_ANCHORED_WINDOW, as "anchors:window"."""
    options: dict = {}
    if images is not None:
        is_image = ids >= VOCABULARY if name == "molmo2" else ids == model.config.image_token_id
        options = {**images, **mask_of_images(name, is_image)}
        options.pop("num_soft_tokens_per_image", None)  # the processor returns it, and no model takes it
    if anchored:
        options["attention_mask"] = additive(visible_with_anchors(ids.shape[1], *map(int, anchored.split(":"))))
    return options


def errors(model, job: dict, result: dict) -> list[float]:
    """Returns the error of each generated token's log-probability, of the first round."""
    found = []
    texts, images = result.get("prompts"), []
    if texts:
        processor = AutoProcessor.from_pretrained(model.name_or_path).image_processor
        images = [processor(p["multi_modal_data"]["image"], return_tensors="pt").to(DEVICE) for p in image_prompts(job["model"])]
    else:
        texts, _ = prompts(job.get("prompts", "mixed"))
    first, anchored = result["rounds"][0], job.get("env", {}).get("VOLTA_FA_VLLM_ANCHORED_WINDOW")
    for i, (text, tokens, steps) in enumerate(zip(texts, first["tokens"], first["logprobs"], strict=True)):
        if job.get("lora"):  # every other prompt used the adapter (engine.py)
            model.base_model.enable_adapter_layers() if i % 2 else model.base_model.disable_adapter_layers()
        if images:
            stop = next((k for k, token in enumerate(tokens, 1) if token >= FIRST_IMAGE_TOKEN), None)
            tokens = tokens[:stop]  # transformers counts a generated image token as a part of an image
        ids = torch.tensor([text + tokens[:-1]], device=DEVICE)
        options = arguments(job["model"], model, ids, images[i] if images else None, anchored)
        with torch.no_grad():
            logits = model(ids, use_cache=False, **options).logits[0, -len(tokens) :]
        exact = logits.double().log_softmax(-1).gather(1, torch.tensor(tokens, device=DEVICE)[:, None])[:, 0]
        # step: log-probabilities of the best two tokens; generation is greedy, so the first is the generated token's
        found += [abs(step[0] - x) for step, x in zip(steps, exact.tolist())]
    return found


def main() -> None:
    """Measures all results of kinds tokens and server that have log-probabilities."""
    folder, models = map(Path, sys.argv[1:])
    jobs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.job.json"))]
    jobs = [j for j in jobs if j["kind"] in ("tokens", "server") and j.get("logprobs", True) and (folder / f"{j['name']}.json").exists()]
    measured, loaded, model = {}, None, None
    for job in sorted(jobs, key=lambda j: (j["model"], j.get("lora", False))):  # so that each model is loaded once
        result = json.loads((folder / f"{job['name']}.json").read_text())
        if "rounds" not in result:
            continue
        try:
            if loaded != (job["model"], job.get("lora", False)):
                model = None  # frees the memory of the model before
                model = load_model(models / job["model"], with_images="prompts" in result)
                if job.get("lora"):
                    from peft import PeftModel

                    model = PeftModel.from_pretrained(model, models / "lora")
                model, loaded = model.to(DEVICE).eval(), (job["model"], job.get("lora", False))
            found = errors(model, job, result)
            largest = max(found) if all(map(math.isfinite, found)) else math.inf  # max() alone passes over NaN
            measured[job["name"]] = {"max": largest, "rms": (sum(x * x for x in found) / len(found)) ** 0.5}
        except Exception as error:  # one model must not keep the others from being measured
            print(f"{job['name']}: {type(error).__name__}: {error}", file=sys.stderr)
        (folder / "reference.json").write_text(json.dumps(measured, indent=1))  # a run that is stopped keeps what is measured


if __name__ == "__main__":
    main()
