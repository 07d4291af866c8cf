#!/usr/bin/env python3
"""Trains LoRA adapters of small random models with unsloth, with its attention on volta_fa and with its own, and compares them.

    python tools/programs/run_unsloth.py --device cuda
    python tools/programs/run_unsloth.py --device cpu --models llama,gemma2 --steps 30

It needs unsloth, unsloth_zoo and what they import, and no network: weights are random and the tokenizer is built here. Each pair of a
model and an attention (volta_fa, sdpa, xformers or reference) runs in a process of its own, a child, because unsloth replaces functions of
the whole process. When all have compiled and trained, or most of --time-limit is over, they measure their steps one after another. A
child that is stopped leaves the losses that it has, and its log has the stack of each thread.

The reference of the losses is unsloth with its own attention, all in float32, with the same weights. The exit status is 1 if a child
fails (xformers' may), if volta_fa ran no call, or if its losses' error is more than rounding and more than twice that of sdpa. The table
counts calls that volta_fa ran, that torch.compile traced as volta_fa's, and that fell back to unsloth's attention.

    cuda  unsloth takes the GPU for one of compute capability 7.5 while it decides what to load, so it trains in float16 as on a T4, and
          VOLTA_FA_FAMILY selects volta_fa's kernels. PyTorch's and xformers' attention are the memory-efficient ones, as on Turing
    cpu   torch.compile is off, and PyTorch code takes the place of unsloth's Triton kernels for rotary embeddings and norms, which need a
          GPU. Its attention code is unchanged. It trains in float32, but Gemma 3, Gemma 4 and gpt-oss partly in float16"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections import namedtuple
from importlib import metadata, util
from pathlib import Path
from typing import Any

#: Sizes of the models and their data by device: tokens of a sequence, keys that a query of a sliding layer sees, layers, columns, query
#: heads and KV heads, headdim of most models, and steps that are timed.
Sizes = namedtuple("Sizes", "seqlen window layers hidden heads kv_heads headdim timed_steps")
SIZES = {"cpu": Sizes(48, 16, 2, 64, 4, 2, 16, 0), "cuda": Sizes(2048, 512, 4, 1024, 8, 4, 128, 8)}
BATCH = 2
VOCABULARY = 512
MODELS = ("llama", "llama-packed", "mistral", "qwen3", "gemma2", "gemma3", "gemma4", "gpt-oss")
#: unsloth trains these in float16 between layers wherever it cannot use bfloat16, and Gemma's attention in float32, whatever the dtype.
FORCED_FLOAT16 = ("gemma3", "gemma4", "gpt-oss")
#: Seconds of --time-limit that are kept for measuring, and seconds after which a child that measures is stopped.
MEASURING, MEASURING_ONE = 60, 20


def configuration(model: str, device: str) -> Any:
    """Returns a small configuration of a model, with windows shorter than the sequences where it has any."""
    import transformers as t

    sizes = SIZES[device]
    # on the GPU the headdims of all released sizes of these models
    headdim = {"gemma3": 256, "gemma4": 256, "gpt-oss": 64}.get(model, sizes.headdim) if device == "cuda" else sizes.headdim
    common = dict(
        vocab_size=VOCABULARY, hidden_size=sizes.hidden, intermediate_size=2 * sizes.hidden, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, max_position_embeddings=2 * sizes.seqlen, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, head_dim=headdim, tie_word_embeddings=False,
    )  # fmt: skip
    if model.startswith("llama"):
        return t.LlamaConfig(**common)
    if model == "qwen3":
        return t.Qwen3Config(**common)
    common["sliding_window"] = sizes.window
    if model == "mistral":
        return t.MistralConfig(**common)
    if model == "gemma2":
        return t.Gemma2Config(**common, query_pre_attn_scalar=headdim, attn_logit_softcapping=20.0)
    common["layer_types"] = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(sizes.layers)]
    if model == "gemma3":
        return t.Gemma3TextConfig(**common, query_pre_attn_scalar=headdim)
    if model == "gemma4":
        return t.Gemma4TextConfig(
            **common, global_head_dim=headdim, num_kv_shared_layers=0, hidden_size_per_layer_input=0, vocab_size_per_layer_input=VOCABULARY
        )
    if model == "gpt-oss":
        return t.GptOssConfig(**common, num_local_experts=4, num_experts_per_tok=2)
    raise SystemExit(f"--models: got {model}, expected some of {', '.join(MODELS)}")


def save_checkpoint(model: str, device: str, folder: Path) -> None:
    """Writes random weights and a tokenizer of one word per token."""
    import torch
    import transformers as t
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    net = t.AutoModelForCausalLM.from_config(configuration(model, device), dtype=torch.float32)
    for name, parameter in net.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
        elif parameter.dim() > 1 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)  # large enough that attention is not uniform
        parameter.data = parameter.data.half().float()  # every dtype loads the same weights
    net.save_pretrained(folder)
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    t.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)


# ---- one model, one attention ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_turing() -> Any:
    """Lets unsloth take the GPU for one of compute capability 7.5, without bfloat16."""
    import torch

    with contextlib.suppress(ImportError):
        from triton.runtime import driver

        driver.active.get_current_target()  # binds the real get_device_capability, so Triton compiles for the real GPU
    real = torch.cuda.get_device_capability, torch.cuda.is_bf16_supported
    torch.cuda.get_device_capability = lambda device=None: (7, 5)
    torch.cuda.is_bf16_supported = lambda including_emulation=True: False
    try:
        yield
    finally:
        torch.cuda.get_device_capability, torch.cuda.is_bf16_supported = real


class _OneDevice(list):  # type: ignore[type-arg]
    """A list with an entry for each GPU, whose first entry is also that of indices that are no integers: unsloth uses "cpu"."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index if type(index) is int else 0)

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index if type(index) is int else 0, value)


def adapt_to_the_cpu(bfloat16: bool) -> None:
    """Gives unsloth a device to ask for its name and memory, and PyTorch code in place of two Triton kernels.

    bfloat16: let unsloth believe that the device has it: it then trains every model in the dtype that we ask for."""
    import torch
    import unsloth.device_type

    properties = types.SimpleNamespace(name="CPU", total_memory=1 << 35, major=7, minor=5)
    unsloth.device_type._DEVICE_MODULE = types.SimpleNamespace(
        get_device_properties=lambda *_: properties, current_device=lambda: "cpu", empty_cache=lambda: None
    )
    torch.cuda.get_device_properties = lambda *_: properties
    # this package asks for a device when it is imported, and defines nothing without one
    for name in [name for name in sys.modules if name.startswith("unsloth_zoo.flex_attention")]:
        del sys.modules[name]
    count, torch.cuda.device_count = torch.cuda.device_count, lambda: 1
    import unsloth_zoo.flex_attention

    assert unsloth_zoo.flex_attention.HAS_FLEX_ATTENTION
    torch.cuda.device_count = count

    def rope(q: Any, k: Any, cos: Any, sin: Any, positions: Any = None) -> Any:
        cos, sin = cos.squeeze(), sin.squeeze()
        cos, sin = (t[: q.shape[2]][None, None] if positions is None else t[positions][:, None] for t in (cos, sin))

        def turn(x: Any) -> Any:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat((-second, first), -1) * sin

        return turn(q), turn(k)

    def norm(layer: Any, x: Any, gemma: bool = False, save_output: bool = False, reuse_grad: bool = False) -> Any:
        epsilon = layer.variance_epsilon if hasattr(layer, "variance_epsilon") else layer.eps
        scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
        return (scaled * (layer.weight.float() + (1.0 if gemma else 0.0))).to(x.dtype)

    replaced = {"DEVICE_TYPE_TORCH": "cpu", "fast_rope_embedding": rope, "fast_rms_layernorm": norm}
    if bfloat16:
        replaced["is_bfloat16_supported"] = lambda *_, **__: True
    for name, module in list(sys.modules.items()):
        if name.startswith("unsloth"):
            for attribute, value in replaced.items():
                if attribute in vars(module):
                    setattr(module, attribute, value)


def load(model: str, device: str, dtype: str, folder: Path) -> Any:
    """Returns unsloth's model with LoRA adapters on its attention."""
    import torch
    from unsloth import FastLanguageModel

    net, _tokenizer = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=SIZES[device].seqlen, dtype=getattr(torch, dtype), load_in_4bit=False, device_map={"": device},
        attn_implementation=None,
    )  # fmt: skip
    net = FastLanguageModel.get_peft_model(
        net, r=8, lora_alpha=16, lora_dropout=0, bias="none", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        use_gradient_checkpointing=False, random_state=0,
    )  # fmt: skip
    if device == "cpu":
        for module in net.modules():
            for name, value in list(vars(module).items()):
                if type(value) is list and ("multi_gpu" in name or "rope" in name):
                    setattr(module, name, _OneDevice(value or [None]))
    return net


def batches(model: str, device: str) -> Any:
    """Yields two random batches in turn, the same for each attention, so there is something to learn in few steps."""
    import torch

    seqlen = SIZES[device].seqlen
    for step in itertools.count():
        generator = torch.Generator().manual_seed(1 + step % 2)
        phrase = torch.randint(4, VOCABULARY, (BATCH, seqlen // 4), generator=generator)
        ids = phrase.repeat(1, 4)
        if model.endswith("-packed"):
            lengths = [seqlen // 2, seqlen // 8, seqlen - seqlen // 2 - seqlen // 8] * BATCH
            labels = ids.reshape(1, -1).clone()
            starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
            labels[0, starts] = -100  # which the loss ignores: a sequence's first token follows none of it
            positions = torch.cat([torch.arange(length) for length in lengths])[None]
            yield dict(
                input_ids=ids.reshape(1, -1).to(device), labels=labels.to(device), position_ids=positions.to(device),
                packed_seq_lengths=torch.tensor(lengths, dtype=torch.int32),
            )  # fmt: skip
        else:
            yield dict(input_ids=ids.to(device), labels=ids.to(device))


class Training:
    """A model in training."""

    def __init__(self, net: Any, model: str, device: str, dtype: str) -> None:
        import torch

        self.net, self.device = net, device
        self.half = device == "cuda" and dtype == "float16" and model not in FORCED_FLOAT16  # whether to autocast and scale
        self.optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=5e-3)
        self.scaler = torch.amp.GradScaler(device, enabled=self.half, init_scale=2.0**12)
        self.batches = batches(model, device)
        net.train()

    def steps(self, count: int) -> list[float]:
        """Trains for some steps and returns the losses."""
        import torch

        losses = []
        for _ in range(count):
            with torch.autocast(self.device, torch.float16, enabled=self.half):
                loss = self.net(**next(self.batches)).loss
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        return [loss.item() for loss in losses]

    def timed(self) -> tuple[float, int]:
        """Returns the median seconds of a step and the peak memory in bytes."""
        import torch

        seconds = []
        torch.cuda.reset_peak_memory_stats()
        for _ in range(SIZES[self.device].timed_steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.steps(1)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds), torch.cuda.max_memory_allocated()


class Report:
    """Writes the result of a child so far into a JSON file. A call adds a stage with the seconds until it, and other entries."""

    def __init__(self, file: Path) -> None:
        self.file, self.begin = file, time.time()
        self.result: dict[str, Any] = {"losses": [], "stages": {}}

    def __call__(self, stage: str, **more: Any) -> None:
        self.result |= more
        self.result["stages"][stage] = round(time.time() - self.begin, 1)
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.result))
        partial.rename(self.file)
        print(f"{self.result['stages'][stage]} s: {stage}", flush=True)


def keep_memory_efficient_attention() -> None:
    """Leaves PyTorch and xformers the attention that they have on Turing."""
    import torch

    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if sys.modules.get("xformers"):
        from xformers.ops.fmha import flash, flash3

        for operator in (flash.FwOp, flash.BwOp, flash3.FwOp, flash3.BwOp):
            operator.OPERATOR = None


def child(model: str, attention: str, device: str, steps: int, folder: Path) -> None:
    """Runs one model with one attention, and writes MODEL-ATTENTION.json into `folder`.

    On CUDA it then waits for a file MODEL-ATTENTION.go, with which run_all() lets one child after the other measure."""
    report = Report(folder / f"{model}-{attention}.json")
    report("began")
    dtype = "float32" if device == "cpu" or attention == "reference" else "float16"
    os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "UNSLOTH_DISABLE_STATISTICS"), "1")
    os.environ["UNSLOTH_COMPILE_LOCATION"] = str(folder / f"compiled-{model}-{attention}")
    if attention == "reference" or (attention != "volta_fa" if model == "gpt-oss" else device == "cpu"):
        # no FlexAttention: in references; in gpt-oss's own attention (eager, with sinks); in others on the CPU, where it has no gradient.
        # On these GPUs unsloth takes none for others.
        os.environ["UNSLOTH_ENABLE_FLEX_ATTENTION"] = "0"
    if attention != "xformers":
        sys.modules["xformers"] = None  # type: ignore[assignment]  # unsloth prefers it
    if device == "cpu":
        os.environ |= {"UNSLOTH_ALLOW_CPU": "1", "TORCHDYNAMO_DISABLE": "1"}
        context: Any = contextlib.nullcontext()
    else:
        context = as_turing() if attention != "reference" else contextlib.nullcontext()
    with context:
        import torch
        import unsloth

        if device == "cpu":
            torch.set_num_threads(1)
            adapt_to_the_cpu(bfloat16=attention == "reference")
        else:
            keep_memory_efficient_attention()
        if attention == "volta_fa":
            import volta_fa

            volta_fa.enable_unsloth(device if device == "cpu" else None, force=True)
        elif attention == "xformers":
            from unsloth.models import _utils

            if not _utils.xformers_attention:
                raise ImportError("xformers: got a package that unsloth cannot load, expected one for this torch")
        report("imported unsloth", version=unsloth.__version__)
        net = load(model, device, dtype, folder / model)
    report("loaded")
    run = Training(net, model, device, dtype)
    losses: list[float] = []
    for step in range(steps):
        losses += run.steps(1)
        if step in (0, 4) or step == steps - 1:
            stats = {"stats": volta_fa.unsloth_stats()} if attention == "volta_fa" else {}
            report(f"{step + 1} steps", losses=losses, **stats)
    if device == "cuda":
        parent = os.getppid()
        while not (folder / f"{model}-{attention}.go").exists():
            if os.getppid() != parent:  # it was killed
                return
            time.sleep(0.05)
        seconds, memory = run.timed()
        report("measured", seconds=seconds, bytes=memory)


# ---- all of them -----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda")
    parser.add_argument("--steps", type=int, default=30, help="steps whose losses are compared (default 30)")
    parser.add_argument("--models", default=",".join(MODELS), help="some of %(default)s")
    parser.add_argument("--jobs", type=int, default=0, help="processes at once (default: 10 on CUDA, 1 on the CPU)")
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds after which no process runs (default %(default)s)")
    parser.add_argument("--output", type=Path, help="a folder for losses and logs (default: a temporary one)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        child(*arguments.child, arguments.device, arguments.steps, arguments.output)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        return compare(arguments, arguments.output or Path(temporary))


def compare(arguments: argparse.Namespace, folder: Path) -> int:
    """Runs all models and prints the table. Returns 1 if a run failed or a loss is off, else 0."""
    folder.mkdir(parents=True, exist_ok=True)
    models = arguments.models.split(",")
    attentions = ["volta_fa", "sdpa", "reference"]
    if arguments.device == "cuda" and util.find_spec("xformers"):
        attentions.append("xformers")
    for model in models:
        save_checkpoint(model, arguments.device, folder / model)
    run_all([(model, attention) for model in models for attention in attentions], arguments, folder)

    versions = {name: metadata.version(name) for name in ("unsloth", "unsloth_zoo", "transformers", "peft", "torch")}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"{arguments.device}, {arguments.steps} steps, batch {BATCH}, seqlen {SIZES[arguments.device].seqlen}")
    losses = f"{'first':>8}{'last':>8}{'max |dloss|':>12}"
    print(f"{'model':13}{'attention':10}{losses}{'ran':>6}{'traced':>7}{'ms/step':>9}{'MiB':>7}  fell back")
    right = [compare_model(model, attentions, arguments, folder) for model in models]
    return int(not all(right))


def compare_model(model: str, attentions: list[str], arguments: argparse.Namespace, folder: Path) -> bool:
    """Prints the rows of a model. Returns whether all of its runs ended, and the losses are right."""
    right, results = True, {}
    for attention in attentions:
        path = folder / f"{model}-{attention}.json"
        results[attention] = json.loads(path.read_text()) if path.exists() else {"losses": [], "stages": {}}
    truth = results["reference"]["losses"]
    errors = {}
    for attention, result in results.items():
        losses = result["losses"]
        if len(losses) < arguments.steps:
            print(f"{model:13}{attention:10}  ended after {result['stages']}: {last_line(folder / f'{model}-{attention}.log')}")
            right &= attention == "xformers"  # it may not be for this torch
        if not losses:
            continue
        error = max(abs(a - b) for a, b in zip(losses, truth)) if truth else float("nan")
        errors[attention] = error
        stats = result.get("stats")
        counts = f"{stats['ran']:6}{stats['traced']:7}" if stats else f"{'':13}"
        speed = f"{1e3 * result['seconds']:9.1f}{result['bytes'] / 2**20:7.0f}" if "seconds" in result else f"{'':16}"
        row = f"{model:13}{attention:10}{losses[0]:8.4f}{losses[-1]:8.4f}{error:12.1e}{counts}{speed}"
        print(row, stats["fell_back"] if stats else "")
        if stats is not None and not stats["ran"] + stats["traced"]:
            print(f"{model:13}volta_fa    ran nothing")
            right = False
    if truth and {"volta_fa", "sdpa"} <= set(errors):
        # twice unsloth's own, and at least what the last digits of its logits are worth: float32 of about 8, or float16
        floor = 2e-5 if arguments.device == "cpu" and model not in FORCED_FLOAT16 else 2e-3
        limit = max(2 * errors["sdpa"], floor)
        if not errors["volta_fa"] <= limit:
            print(f"{model:13}volta_fa    loss is off: {errors['volta_fa']:.1e}, expected at most {limit:.1e}")
            right = False
    return right


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a child, which first writes its threads' stacks to its log."""
    process.send_signal(signal.SIGUSR1)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
    process.kill()
    process.wait()


def run_all(waiting: list[tuple[str, str]], arguments: argparse.Namespace, folder: Path) -> None:
    """Runs each pair in a process of its own: all train side by side, then each that is ready measures alone."""
    begin, limit = time.time(), arguments.time_limit
    jobs = arguments.jobs or (10 if arguments.device == "cuda" else 1)
    training: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
    ready: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
    for name in waiting:
        for ending in ("json", "go"):
            (folder / f"{'-'.join(name)}.{ending}").unlink(missing_ok=True)

    def stages(name: tuple[str, str]) -> dict[str, float]:
        file = folder / f"{'-'.join(name)}.json"
        return json.loads(file.read_text())["stages"] if file.exists() else {}

    def tell(name: tuple[str, str], what: str) -> None:
        print(f"[{time.time() - begin:4.0f} s] {' '.join(name)}: {what}, {stages(name)}", flush=True)

    waiting = list(waiting)
    while (waiting or training) and time.time() - begin < limit - (MEASURING if arguments.device == "cuda" else 0):
        while waiting and len(training) < jobs:
            model, attention = waiting.pop(0)
            with open(folder / f"{model}-{attention}.log", "wb") as log:
                command = [sys.executable, __file__, "--child", model, attention, "--output", str(folder)]
                command += ["--device", arguments.device, "--steps", str(arguments.steps)]
                environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2", "PYTHONUNBUFFERED": "1"}
                training[model, attention] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        time.sleep(0.1)
        for name, process in list(training.items()):
            status = process.poll()
            if status is not None:
                tell(name, "ended" if status == 0 else f"ended with status {status}")
                del training[name]
            elif arguments.device == "cuda" and f"{arguments.steps} steps" in stages(name):
                tell(name, "trained")
                ready[name] = training.pop(name)
    for name in waiting:
        tell(name, "not begun")
    for name, process in training.items():
        stop(process)
        tell(name, "stopped")
    for name, process in ready.items():
        if time.time() - begin < limit:
            (folder / f"{'-'.join(name)}.go").touch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(MEASURING_ONE)
        if process.poll() is None:
            stop(process)
        tell(name, "measured" if "measured" in stages(name) else "not measured")


def last_line(log: Path) -> str:
    """Returns the last line of a log, or where the main thread of a stopped child was."""
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    *_, before, stack = ["", "", *text.rsplit("(most recent call first):\n", 1)][-3:]
    return (stack.splitlines()[0] if before else text.splitlines()[-1]).strip()[:160] if text else "no output"


if __name__ == "__main__":
    sys.exit(main())
