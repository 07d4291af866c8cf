"""Runs ComfyUI's models through volta_fa and compares images, time and memory with ComfyUI's own attention.

    python tools/programs/run_comfyui.py COMFYUI_FOLDER [--device cpu|cuda] [--dtype float16|float32] [--models sdxl,flux,...]
        [--starts pytorch,flash,...] [--limit SECONDS_PER_WORKER] [--json FILE]

COMFYUI_FOLDER has ComfyUI's source; this Python has its requirements. The models are ComfyUI's classes with random weights, sampled by
ComfyUI's KSampler: on a GPU whole SDXL and Flux and a third of Qwen-Image's layers, small ones on the CPU. Each way to start ComfyUI
(--starts) has a process of its own, a worker, which runs one or several paths: ways to compute attention. The workers and their paths:

    pytorch     its scaled_dot_product_attention, on a GPU also its memory-efficient kernel alone, then that with enable_sdpa(), then the
                node of integrations/comfyui; on the CPU both also on a simulated V100
    flash       --use-flash-attention, with volta_fa's flash_attn package
    split, quad --use-split-cross-attention, --use-quad-cross-attention
    xformers    no flag, on a GPU and with xformers installed, which ComfyUI then prefers: xformers, then enable_xformers(), then the node

Columns of the table:
    volta_fa, fell back  attention calls that ran on volta_fa, and on ComfyUI's own attention; reasons follow at the end of the line
    error       the largest difference of a path's latents, or its VAE's image, from ComfyUI's own model in a wider dtype (EXACT); of CLIP,
                from its output without volta_fa, at most CLIP_DIFFERENCE
    ratio       this error divided by that of the first path, ComfyUI's SDPA; on volta_fa's paths at most ALLOWED, unless the error is
                below ROUNDING
    attention   the worst ratio of errors of single attention calls, volta_fa's and ComfyUI's against fp64; at most ALLOWED. Calls of the
                node, one of each shape; on the CPU, of the simulated V100
    ms/step     of a VAE, of its whole decode
    MiB         on a GPU, peak memory beyond what was held before

The exit status is 1 if a path breaks these rules, fails, or runs no call on volta_fa where it should."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

# CONFIGS: models by kind; build(): a model with random weights, which randomize() makes; problem_of(): the edge of its latents, text tokens
# and steps; sample(): the latents that KSampler makes
from comfyui_models import CONFIGS, build, problem_of, randomize, sample

REPOSITORY = Path(__file__).resolve().parents[2]
#: ComfyUI's arguments, by worker.
FLAGS = {
    "pytorch": ["--use-pytorch-cross-attention"],
    "flash": ["--use-flash-attention"],
    "split": ["--use-split-cross-attention"],
    "quad": ["--use-quad-cross-attention"],
    "xformers": [],
}
#: The dtype of the model that gives the exact result, by the dtype of the model compared.
EXACT = {"float16": "float32", "float32": "float64"}
#: Allowed ratio of errors: flash-attn's tests allow this one for outputs.
ALLOWED = 2.0
#: Errors below this, relative to the largest latent, are rounding in any case: KSampler keeps latents in fp32.
ROUNDING = 2.0**-22
#: If ComfyUI's own error is above this, relative to the largest latent, the model is chaotic, and the comparison means nothing.
CHAOS = 0.05
#: Allowed difference of CLIP with and without volta_fa, relative to its largest output: both compute attention in fp32.
CLIP_DIFFERENCE = 2.0**-16
#: Models of comfyui_models, and what `dtypes`, `clip` and `vae` below run.
MODELS = ("sdxl", "flux", "flux-mask", "qwen", "dtypes", "clip", "vae")


# ---- a worker: one process, one way to start ComfyUI --------------------------------------------------------------


def node_package():
    """Loads integrations/comfyui as ComfyUI loads a folder of custom_nodes. Returns the package and its module `attention`."""
    folder = REPOSITORY / "integrations" / "comfyui"
    name = str(folder).replace(".", "_x_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name], sys.modules[name + ".attention"]


def with_node(patcher):
    """Returns the model with the node's attention, as the node's output in ComfyUI. every_device: on newer GPUs and the CPU too."""
    package, _ = node_package()
    return package.NODE_CLASS_MAPPINGS["VoltaAttention"]().apply(patcher, every_device=True)[0]


class FlashCalls(logging.Handler):
    """Counts the calls of flash_attn, and ComfyUI's warnings about those that failed."""

    def __init__(self):
        super().__init__()
        import comfy.ldm.modules.attention as attention

        self.counts = Counter()
        if hasattr(attention, "flash_attn_func"):
            function = attention.flash_attn_func

            def counting(*args, **kwargs):
                out = function(*args, **kwargs)
                self.counts["ran"] += 1
                return out

            attention.flash_attn_func = counting
        logging.getLogger().addHandler(self)

    def emit(self, record):
        if "Flash Attention failed" in record.getMessage():
            self.counts[record.getMessage().split(": ", 1)[1].splitlines()[0][:60]] += 1


class Ready(NamedTuple):
    """A model that is ready to be sampled by one path."""

    patcher: Any  # the model, in ComfyUI's ModelPatcher
    context: Any = contextlib.nullcontext()  # in which to sample it
    counts: Callable[[], Counter[str]] = Counter  # returns the attention calls so far: `ran` on volta_fa, and the others by reason


def paths(worker, device):
    """Returns the paths of this worker by name: functions that make a model, in a ModelPatcher, `Ready`."""
    import volta_fa
    from volta_fa.check.kernels import environment  # sets variables in a context

    @contextlib.contextmanager
    def sdpa_enabled(**variables):
        with environment(**variables), volta_fa.sdpa_enabled(device, force=True):
            yield

    @contextlib.contextmanager
    def xformers_enabled():
        volta_fa.enable_xformers(force=True)  # on GPUs newer than Turing too
        try:
            yield
        finally:
            volta_fa.disable_xformers()

    def switched(patcher, context, stats):
        stats(reset=True)
        return Ready(patcher, context, lambda: Counter(ran=(found := stats())["ran"], **found["fell_back"]))

    def through_sdpa(patcher, **variables):
        return switched(patcher, sdpa_enabled(**variables), volta_fa.sdpa_stats)

    def through_xformers(patcher):
        return switched(patcher, xformers_enabled(), volta_fa.xformers_stats)

    def through_node(patcher, **variables):
        _, attention = node_package()
        attention.counts.clear()
        return Ready(with_node(patcher), environment(**variables), attention.counts.copy)

    if worker == "pytorch":
        own = {"SDPA, mem-efficient": lambda patcher: Ready(patcher, memory_efficient())} if device == "cuda" else {}
        ours = {"enable_sdpa": through_sdpa, "node": through_node}
        simulated = {f"{name}, simulated V100": functools.partial(path, VOLTA_FA_SIMULATE="1") for name, path in ours.items()}
        return {"SDPA": Ready, **own, **ours, **(simulated if device == "cpu" else {})}
    if worker == "flash":
        calls = FlashCalls()
        return {"--use-flash-attention": lambda patcher: Ready(patcher, counts=calls.counts.copy)}
    if worker == "xformers":
        return {"xformers": Ready, "enable_xformers": through_xformers, "node instead of xformers": through_node}
    return {"split attention" if worker == "split" else "sub-quadratic attention": Ready}


def memory_efficient():
    """Returns a context in which ComfyUI calls the attention of PyTorch that Volta and Turing have."""
    import comfy.ops
    from torch.nn.attention import SDPBackend

    return mock.patch.object(comfy.ops, "SDPA_BACKEND_PRIORITY", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def measure(patcher, name, device, path, reference):
    """Samples with one path. Returns its row."""
    patcher, context, counts = path(patcher)
    steps = problem_of(name, device).steps
    with context:
        return timed(lambda: sample(patcher, name, device, steps), steps, device, counts, reference)


def timed(run, steps, device, counts, reference):
    """Runs a function that returns latents or an image. Returns a row: time, memory on a GPU, calls, and the error to the reference."""
    import torch

    row = {}
    if device == "cuda":
        run()  # compiles, and fills caches
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    before = counts()
    start = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
        row["memory_mib"] = (torch.cuda.max_memory_allocated() - held) / 2**20
    row["seconds_per_step"] = (time.perf_counter() - start) / steps
    row["calls"] = dict(counts() - before)
    row["finite"] = bool(result.isfinite().all())
    row["error"] = (result - reference).abs().max().item()
    row["largest"] = reference.abs().max().item()
    return row


def attention_errors(patcher, name, device):
    """Samples one step through the node. Returns, by kind of call (shapes, heads, mask), the errors of volta_fa and of ComfyUI's own
    attention against fp64, and their ratio."""
    import torch
    import torch.nn.functional as F

    _, attention = node_package()
    override = attention.make_override(every_device=True)  # ComfyUI calls it in place of its attention, `func`
    seen = {}

    def both(func, q, k, v, heads, *args, **kwargs):
        out = override(func, q, k, v, heads, *args, **kwargs)
        mask = kwargs.get("mask", args[0] if args else None)
        kind = f"{tuple(q.shape)} {tuple(k.shape)} heads {heads}" + (f" mask {tuple(mask.shape)}" if mask is not None else "")
        if kind not in seen:
            own = func(q, k, v, heads, *args, **kwargs)
            # views: (batch, tokens, heads, headdim) of q, k and v
            views, reason = attention._views(q, k, v, heads, kwargs.get("skip_reshape", False), bool(kwargs.get("enable_gqa")))
            assert not reason, reason
            bias = None if mask is None else attention._rank_4(mask)  # (batch, heads, tokens of q, of k), or 1
            exact = torch.empty(views[0].transpose(1, 2).shape, dtype=torch.float64, device=q.device)
            for h in range(heads):  # one head at a time, because fp64 scores of all are large
                one = [t[:, :, h : h + 1].transpose(1, 2).double() for t in views]
                part = None if bias is None else bias if bias.dtype == torch.bool else bias.double()
                exact[:, h : h + 1] = F.scaled_dot_product_attention(*one, attn_mask=part)
            exact = exact if kwargs.get("skip_output_reshape") else exact.transpose(1, 2).flatten(2)
            errors = [(found.double() - exact).abs().max().item() for found in (out, own)]
            ratio = errors[0] / errors[1] if errors[1] else math.inf if errors[0] else 0.0
            seen[kind] = {"volta_fa": errors[0], "own": errors[1], "ratio": ratio}
        return out

    patcher = patcher.clone()
    patcher.model_options.setdefault("transformer_options", {})["optimized_attention_override"] = both
    sample(patcher, name, device, steps=1)
    return seen


def dtypes(device):
    """Samples a small bf16 model through the node, which serves fp16 and fp32: every call runs ComfyUI's attention, and nothing changes."""
    import torch

    patcher = build("sdxl-small", torch.bfloat16, device)
    steps = problem_of("sdxl-small", device).steps
    expected = sample(patcher, "sdxl-small", device, steps)
    _, attention = node_package()
    attention.counts.clear()
    found = sample(with_node(patcher), "sdxl-small", device, steps)
    calls = dict(attention.counts)
    problem = None if calls and not calls.get("ran") and torch.equal(found, expected) else f"expected ComfyUI's own result: {calls}"
    return [{"model": "SDXL, small, bfloat16", "path": "node", "calls": calls, "problem": problem}]


def clip(device):
    """Runs CLIP with enable_sdpa and without it: the node's override does not reach its attention. Its weights are fp16, its calls fp32."""
    import comfy.sd1_clip
    import torch

    import volta_fa

    model = comfy.sd1_clip.SDClipModel(device=device, dtype=torch.float16)
    randomize(model.transformer, device)

    def run():
        return model([[49406, *range(400, 475), 49407]])[0].float()

    with torch.no_grad():
        expected = run()
        volta_fa.sdpa_stats(reset=True)
        with volta_fa.sdpa_enabled(device, force=True):
            found = run()
    stats = volta_fa.sdpa_stats()
    row = {"difference": (found - expected).abs().max().item(), "largest": expected.abs().max().item()}
    return [{"model": "CLIP-L text encoder", "path": "enable_sdpa", "calls": {"ran": stats["ran"], **stats["fell_back"]}, **row}]


def vae(device, dtype, all_paths):
    """Decodes with SDXL's VAE, one head of 512, in each path but the node, whose override does not reach its attention."""
    import torch
    from comfy.ldm.models.autoencoder import AutoencoderKL

    config = dict(z_channels=4, resolution=256, in_channels=3, out_ch=3, ch=128, double_z=True, attn_resolutions=[], dropout=0.0)
    config |= dict(ch_mult=[1, 2, 4, 4], num_res_blocks=2) if device == "cuda" else dict(ch_mult=[1, 4], num_res_blocks=1)
    edge = 128 if device == "cuda" else 16
    latent = torch.randn(1, 4, edge, edge, generator=torch.Generator().manual_seed(2))

    def decoder(dtype):
        model = AutoencoderKL(ddconfig=config, embed_dim=4).to(device, dtype)
        randomize(model, device)
        return lambda: model.decode(latent.to(device, dtype)).double()

    rows = []
    with torch.no_grad():
        reference, run = decoder(getattr(torch, EXACT[dtype]))(), decoder(getattr(torch, dtype))
        for label, path in all_paths.items():
            if not label.startswith("node"):
                _, context, counts = path(None)
                with context:
                    rows.append({"model": f"VAE decoder, {dtype}", "path": label, **timed(run, 1, device, counts, reference)})
    return rows


def run_worker(worker, folder, device, dtype, models, shared, result):
    """Runs the paths of one worker and writes their rows to the file `result`. `pytorch`, the first, saves exact latents in `shared`."""
    sys.path[0] = folder  # not the folder of this script, whose files are named like packages
    sys.argv = ["main.py", *FLAGS[worker], *([] if worker == "xformers" else ["--disable-xformers"])]
    sys.argv += ["--cpu"] if device == "cpu" else ["--highvram"]  # which keeps a model whole on the GPU, however large
    import comfy.options

    comfy.options.enable_args_parsing()
    os.environ["VOLTA_FA_ENABLE_SDPA"] = "0"  # here, each path switches for itself
    import volta_fa

    if worker == "flash":
        volta_fa.install_flash_attn_shim()
    import comfy.ldm.modules.attention
    import comfy.model_management
    import torch

    from volta_fa.check.kernels import environment  # sets variables in a context

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows = []

    def save():
        Path(result).write_text(json.dumps({"attention": comfy.ldm.modules.attention.optimized_attention.__name__, "rows": rows}))

    def attempt(label, path, function):
        """Adds the rows that `function` returns, if any, or one with its error."""
        try:
            rows.extend(function() or [])
        except Exception:
            rows.append({"model": label, "path": path, "problem": traceback.format_exc()})
        save()

    def save_exact_latents(kind, names):
        exact = build(kind, getattr(torch, EXACT[dtype]), device)
        # comfy_kitchen's rotary embedding refuses fp64. ComfyUI's own, for training, takes it and computes in fp32.
        comfy.model_management.in_training = EXACT[dtype] == "float64"
        for name in names:
            torch.save(sample(exact, name, device, problem_of(name, device).steps), Path(shared, f"{name}.pt"))
        comfy.model_management.in_training = False

    def compare(kind, names):
        if worker == "pytorch":  # for all workers
            attempt(kind, EXACT[dtype], lambda: save_exact_latents(kind, names))
        release()
        patcher = build(kind, getattr(torch, dtype), device)
        for name in names:
            reference = torch.load(Path(shared, f"{name}.pt"))
            errors = {}
            if worker == "pytorch":
                with environment(**({"VOLTA_FA_SIMULATE": "1"} if device == "cpu" else {})):
                    attempt(name, "attention", lambda: errors.update(attention_errors(patcher, name, device)))
            for label, path in all_paths.items():
                if name == "flux-mask" and worker in ("split", "quad"):
                    continue
                attempt(name, label, lambda: [{"model": name, "path": label, **measure(patcher, name, device, path, reference)}])
                if label == ("node, simulated V100" if device == "cpu" else "node") and errors:
                    rows[-1]["attention"] = errors

    all_paths = paths(worker, device)
    others = {
        "dtypes": ("node", lambda: dtypes(device)),
        "clip": ("enable_sdpa", lambda: clip(device)),
        "vae": ("enable_sdpa", lambda: vae(device, dtype, all_paths)),
    }
    with torch.inference_mode():
        for kind in CONFIGS:
            names = [name for name in models if name.startswith(kind)]
            if names:
                attempt(kind, worker, lambda: compare(kind, names))
                release()
        for name in models:
            if name in others and worker == "pytorch":
                attempt(name, *others[name])
    save()


def release():
    import comfy.model_management
    import torch

    comfy.model_management.unload_all_models()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- all workers, the table and the verdict ----------------------------------------------------------------------


def worst_ratio(row):
    """Returns the largest ratio of a row's attention calls; infinity if one is NaN, which max() may pass over."""
    ratios = [e["ratio"] for e in row.get("attention", {}).values()]
    return max((math.inf if math.isnan(ratio) else ratio for ratio in ratios), default=None)


def judge(rows):
    """Adds to each row the ratio of its error to that of SDPA, and `problem` where it breaks the rule."""
    own = {row["model"]: row["error"] for row in rows if row["path"] == "SDPA" and "error" in row}
    for row in rows:
        if row.get("problem"):
            continue
        uses_volta_fa = row["path"].startswith(("enable_", "node", "--use-flash-attention"))
        if "error" in row:
            row["ratio"] = row["error"] / own[row["model"]] if own.get(row["model"]) else float("nan")
            if row["path"] == "SDPA" and not row["error"] <= CHAOS * row["largest"]:
                row["problem"] = f"error {row['error']:.3g} of latents up to {row['largest']:.3g}: this model compares nothing"
            small = row["ratio"] <= ALLOWED or row["error"] <= ROUNDING * row["largest"]
            if uses_volta_fa and not (row["finite"] and small):
                row["problem"] = f"error {row['error']:.3g} is {row['ratio']:.2f} times that of SDPA"
            masked_flash = row["model"] == "flux-mask" and row["path"].startswith("--use")  # ComfyUI passes no mask to flash-attn
            if uses_volta_fa and not row["calls"].get("ran") and not masked_flash:
                row["problem"] = f"no call ran on volta_fa: {row['calls']}"
        if "difference" in row:
            allowed = row["largest"] * CLIP_DIFFERENCE
            if not row["calls"].get("ran"):
                row["problem"] = f"no call ran on volta_fa: {row['calls']}"
            elif not row["difference"] <= allowed:
                row["problem"] = f"differs by {row['difference']:.3g} from ComfyUI's own result, allowed {allowed:.3g}"
        worst = worst_ratio(row)
        if worst is not None and not worst <= ALLOWED:
            row["problem"] = f"attention: error {worst:.2f} times that of ComfyUI's"


def table(rows):
    lines = [
        f"{'model':22} {'path':27} {'volta_fa':>8} {'fell back':>9} {'error':>9} {'ratio':>6} {'attention':>9} {'ms/step':>9} {'MiB':>7}"
    ]
    for row in rows:
        calls = dict(row.get("calls", {}))
        ran = calls.pop("ran", 0)
        worst = worst_ratio(row)
        step = row.get("seconds_per_step")
        cells = [(row.get("error", row.get("difference")), "9.2e"), (row.get("ratio"), "6.2f"), (worst, "9.2f")]
        cells += [(None if step is None else step * 1e3, "9.1f"), (row.get("memory_mib"), "7.0f")]
        text = [" " * int(form.split(".")[0]) if value is None else format(value, form) for value, form in cells]
        line = " ".join([f"{row['model']:22} {row['path']:27} {ran:8} {sum(calls.values()):9}", *text])
        notes = [f"{reason}: {n}" for reason, n in calls.items()]
        if row.get("problem"):
            notes.append("PROBLEM: " + row["problem"].strip().splitlines()[-1])
        lines.append("  ".join([line, *notes]))
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="ComfyUI's source")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=list(EXACT), default="float16", help="of the models but CLIP")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated: " + ", ".join(MODELS))
    parser.add_argument("--starts", default=",".join(FLAGS), help="comma-separated: " + ", ".join(FLAGS))
    parser.add_argument("--limit", type=float, default=1200, help="seconds for each way to start ComfyUI")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--worker", nargs=3, metavar=("WORKER", "SHARED", "RESULT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    models = args.models.split(",")
    if not args.starts.startswith("pytorch") or not set(models) <= set(MODELS) or not set(args.starts.split(",")) <= set(FLAGS):
        parser.error("--starts begins with pytorch, which makes the exact results, and names are as listed")
    if args.worker:
        worker, shared, result = args.worker
        run_worker(worker, args.folder, args.device, args.dtype, models, shared, result)
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as shared:
        for worker in args.starts.split(","):
            if worker == "xformers" and (args.device == "cpu" or importlib.util.find_spec("xformers") is None):
                continue
            result = Path(shared, f"{worker}.json")
            start = time.perf_counter()
            command = [sys.executable, __file__, args.folder, "--device", args.device, "--dtype", args.dtype, "--models", args.models]
            problem = ""
            try:
                command += ["--worker", worker, shared, str(result)]
                ran = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=args.limit)
                if ran.returncode:
                    problem = f"exit status {ran.returncode}: {ran.stderr[-3000:]}"
            except subprocess.TimeoutExpired:
                problem = f"not ready after {args.limit:.0f} s"
            found = json.loads(result.read_text()) if result.exists() else {"attention": "?", "rows": []}
            print(f"{worker}: {found['attention']}, {time.perf_counter() - start:.0f} s", file=sys.stderr)
            rows += found["rows"]
            if problem:
                rows.append({"model": "", "path": worker, "problem": problem})
    judge(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))
    problems = [row for row in rows if row.get("problem")]
    for row in problems:
        print(f"\n{row['model']}, {row['path']}: {row['problem'].strip()}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
