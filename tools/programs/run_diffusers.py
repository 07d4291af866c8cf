"""Runs diffusers' own models, with random weights, through each way (WAYS) that leads to volta_fa, and compares outputs and gradients.

    python tools/programs/run_diffusers.py                      # small models on the CPU, in float32, and two gloo processes
    python tools/programs/run_diffusers.py --device cuda        # small models in float16, then times of models of real width
    python tools/programs/run_diffusers.py --device cuda --dtype float32      # the same in float32
    python tools/programs/run_diffusers.py --only 'flux,wan/ring*'    # rows whose model or way contains a text, or matches a pattern

It needs diffusers, and xformers for its rows (`pip install diffusers; pip install --no-deps xformers`). The reference is the same model in
float64 with PyTorch's attention. A row shows the maximum error of the output and of the gradient of the input, relative to the reference's
largest element, and beside them those of PyTorch's attention in the row's dtype. It counts calls that volta_fa ran and that fell back. A
row is WRONG if it fails, if its error is above 1e-6 and more than 2 times PyTorch's (gradient: 3 times), if volta_fa ran no call, or if one
fell back. Exits with 1 if a row is wrong. On a newer GPU the kernels are Turing's PTX: times there say nothing about a T4 or V100."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any
from unittest import mock

os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import volta_fa

if importlib.util.find_spec("flash_attn") is None:
    volta_fa.install_flash_attn_shim()  # before diffusers looks for it

import diffusers
from diffusers.models import attention_dispatch

# build(): a float32 module and its inputs; forward(): its output; forward_backward(): the output, and the gradient of the first input
from diffusers_models import LARGE, SMALL, Model, build, cast, forward, forward_backward

#: Multiples of PyTorch's errors that volta_fa's may reach, for outputs and gradients: those of flash-attn's tests.
FORWARD, BACKWARD = 2.0, 3.0
#: Relative errors below this are allowed in any case: float32 sums in another order.
FLOOR = 1e-6
#: volta_fa's name in PyTorch's registry of flash implementations.
VOLTA = "VOLTA"


# ---- ways to volta_fa ---------------------------------------------------------------------------------------------------------
#
# Each is a context in which a module's attention takes this way. It yields a function that returns counts of calls: `ran` on volta_fa,
# and `fell_back` to PyTorch, by reason. NotImplementedError says why a way is not for a model. `model` describes the module.


@contextmanager
def native(module: Any, model: Model, device: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """PyTorch's own attention."""
    yield dict  # which returns no counts


@contextmanager
def memory_efficient(module: Any, model: Model, device: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """PyTorch's memory-efficient attention, its choice on Volta and Turing."""
    from torch.backends import cuda

    for switch in (cuda.enable_flash_sdp, cuda.enable_cudnn_sdp):
        switch(False)
    try:
        yield dict
    finally:
        for switch in (cuda.enable_flash_sdp, cuda.enable_cudnn_sdp):
            switch(True)


@contextmanager
def sdpa(module: Any, model: Model | None, device: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """`volta_fa.enable_sdpa()`, which diffusers' default backend needs."""
    volta_fa.sdpa_stats(reset=True)
    with volta_fa.sdpa_enabled(device, force=device != "cpu"):  # force: on GPUs newer than Turing too
        yield volta_fa.sdpa_stats


@contextmanager
def flash(module: Any, model: Model, device: str, backend: str = "flash") -> Iterator[Callable[[], dict[str, Any]]]:
    """The backend `flash`, on the stand-in for flash-attn, or `_native_flash`."""
    if not model.dispatches:
        raise NotImplementedError("its attention has no backends")
    if model.has_mask:
        raise NotImplementedError("it has a mask, which diffusers refuses for this backend")
    module.set_attention_backend(backend)
    try:
        with counted_op() as count:
            yield count
    finally:
        module.set_attention_backend("native")


@contextmanager
def native_flash(module: Any, model: Model, device: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """The backend `_native_flash`, on PyTorch's registry of flash implementations. PyTorch chooses it on newer GPUs only."""
    if device == "cpu":
        raise NotImplementedError("PyTorch has another flash op on the CPU, except in a ring")
    if next(module.parameters()).dtype == torch.float32:
        raise NotImplementedError("PyTorch's flash op takes no float32")
    with flash(module, model, device, "_native_flash") as count, registered():
        yield count


@contextmanager
def registered() -> Iterator[None]:
    """Activates volta_fa in PyTorch's registry of flash implementations."""
    torch.nn.attention.activate_flash_attention_impl(VOLTA)
    try:
        yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()


@contextmanager
def xformers(module: Any, model: Model, device: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """xformers, on `volta_fa.enable_xformers()`: by backend, or by diffusers' older switch where a model has that alone."""
    volta_fa.enable_xformers(device, force=device != "cpu")
    volta_fa.xformers_stats(reset=True)
    processors = [(layer, layer.processor) for layer in module.modules() if hasattr(layer, "processor")]
    try:
        if model.dispatches:
            module.set_attention_backend("xformers")
        else:
            with small_trial(device):
                module.enable_xformers_memory_efficient_attention()
        volta_fa.xformers_stats(reset=True)
        yield volta_fa.xformers_stats
    finally:
        volta_fa.disable_xformers()
        if model.dispatches:
            module.set_attention_backend("native")
        else:
            module.disable_xformers_memory_efficient_attention()
            for layer, processor in processors:  # the switch leaves SD3's layers a processor without joint attention
                layer.set_processor(processor)


@contextmanager
def small_trial(device: str) -> Iterator[None]:
    """Lets diffusers' older switch through where xformers' own operators cannot run: it asks for a GPU, and tries tensors in float32."""
    randn, dtype = torch.randn, torch.float32 if device == "cpu" else torch.float16
    trial = mock.patch.object(torch, "randn", lambda shape, **options: randn(shape, device=device, dtype=dtype))
    with mock.patch.object(torch.cuda, "is_available", return_value=True), trial:
        yield


@contextmanager
def counted_op() -> Iterator[Callable[[], dict[str, Any]]]:
    """Counts the calls of volta_fa's forward operator until the yielded function is called, for ways that never fall back."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profiler.start()

    def count() -> dict[str, Any]:
        profiler.stop()
        return {"ran": sum(event.name == "volta_fa::fwd" for event in profiler.events() or ()), "fell_back": {}}

    yield count


WAYS = {"enable_sdpa": sdpa, "flash": flash, "_native_flash": native_flash, "enable_xformers": xformers}


# ---- comparison -----------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A row of a table: a model, a way, cells by column (or a `note` alone), and whether it is right."""

    model: str
    way: str
    cells: dict[str, str] = field(default_factory=dict)
    right: bool = True


@contextmanager
def noted(row: Row) -> Iterator[None]:
    """Notes in the row why its way has no result."""
    try:
        yield
    except NotImplementedError as reason:
        row.cells = {"note": str(reason).partition("\n")[0]}
    except Exception as error:
        row.cells, row.right = {"note": f"{type(error).__name__}: {error}".partition("\n")[0]}, False


def fallen(stats: dict[str, Any]) -> str:
    """Returns as text how many calls fell back, by reason."""
    return ", ".join(f"{n} {reason}" for reason, n in stats.get("fell_back", {}).items()) or "0"


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the maximum error relative to the largest expected element."""
    return float((found - expected).abs().max() / expected.abs().max())


Tensors = tuple[torch.Tensor, ...]  # the output, and the gradient of the input if there is one


def judge(found: Tensors, theirs: Tensors, expected: Tensors, stats: dict[str, Any]) -> tuple[dict[str, str], bool]:
    """Returns the cells of a row, and whether it is right. `theirs`: with PyTorch's attention. `expected`: in float64."""
    errors = [(relative(ours, exact), relative(other, exact)) for ours, other, exact in zip(found, theirs, expected)]
    right = all(ours <= max(FLOOR, limit * other) for (ours, other), limit in zip(errors, (FORWARD, BACKWARD)))
    right = right and stats.get("ran", 0) > 0 and not stats.get("fell_back")
    cells = {"error": f"{errors[0][0]:.1e}", "PyTorch's": f"{errors[0][1]:.1e}"}
    if len(errors) > 1:
        # the space tells this key from the one above; show() strips it
        cells |= {"gradient": f"{errors[1][0]:.1e}", "PyTorch's ": f"{errors[1][1]:.1e}"}
    return cells | {"ran": str(stats.get("ran", 0)), "fell back": fallen(stats)}, right


def compare(model: Model, device: str, dtype: torch.dtype, wanted: Callable[[str, str], bool]) -> Iterator[Row]:
    """Yields the rows of a small model. `wanted(model, way)`: whether --only asks for the row."""
    ways = {name: way for name, way in WAYS.items() if wanted(model.name, name)}
    if not ways:
        return
    module, inputs = build(model, device)
    expected = forward_backward(copy.deepcopy(module).double(), inputs, torch.float64)
    module = module.to(dtype)
    with memory_efficient(module, model, device):
        theirs = forward_backward(module, inputs, dtype)
    for name, way in ways.items():
        row, module_of_row = Row(model.name, name), copy.deepcopy(module)
        with noted(row), way(module_of_row, model, device) as stats:
            found = forward_backward(module_of_row, inputs, dtype)
            row.cells, row.right = judge(found, theirs, expected, stats())
        yield row


# ---- pipelines ------------------------------------------------------------------------------------------------------------------


def pipelines(device: str, dtype: torch.dtype, wanted: Callable[[str, str], bool]) -> Iterator[Row]:
    """Yields rows of whole pipelines: two steps from given embeddings to an image, in PyTorch's attention and volta_fa's.

    Schedulers do not run in float64, so errors are relative to a run in float32 with SDPA's math backend."""
    none = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    small = {model.name: model for model in SMALL}

    def guided(tokens: int, width: int) -> dict[str, torch.Tensor]:
        shapes = {"prompt_embeds": (1, tokens, width), "pooled_prompt_embeds": (1, 32)}
        embeds = {f"{sign}{kind}": torch.randn(*shape) for sign in ("", "negative_") for kind, shape in shapes.items()}
        return embeds | {"latents": torch.randn(1, 4, 8, 8)}

    def make(name: str) -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(0)
        decoder, flow = small["vae"].make().eval(), diffusers.FlowMatchEulerDiscreteScheduler()
        if name == "FluxPipeline":  # its packed latents have four times the VAE's channels
            pipeline = diffusers.FluxPipeline(flow, vae=decoder, transformer=small["flux"].make().eval(), **none)
            embeds = dict(prompt_embeds=torch.randn(1, 8, 32), pooled_prompt_embeds=torch.randn(1, 32), latents=torch.randn(1, 16, 16))
            return pipeline, embeds
        if name == "StableDiffusion3Pipeline":
            options = none | dict.fromkeys(("text_encoder_3", "tokenizer_3"))
            return diffusers.StableDiffusion3Pipeline(small["sd3"].make().eval(), flow, decoder, **options), guided(10, 32)
        unet = small["sdxl-unet"].make().eval()
        return diffusers.StableDiffusionXLPipeline(decoder, unet=unet, scheduler=diffusers.EulerDiscreteScheduler(), **none), guided(77, 64)

    def run(name: str, dtype: torch.dtype) -> tuple[torch.Tensor]:
        pipeline, embeds = make(name)
        pipeline = pipeline.to(device, dtype)
        pipeline.set_progress_bar_config(disable=True)
        image = pipeline(
            **{key: value.to(device, dtype) for key, value in embeds.items()}, height=16, width=16, num_inference_steps=2,
            output_type="np",
        ).images  # fmt: skip
        return (torch.as_tensor(image).double(),)

    for name in ("FluxPipeline", "StableDiffusion3Pipeline", "StableDiffusionXLPipeline"):
        if not wanted(name, "enable_sdpa"):
            continue
        row = Row(name, "enable_sdpa")
        with noted(row):
            with sdpa_kernel(SDPBackend.MATH):
                expected = run(name, torch.float32)
            theirs = run(name, dtype)
            with sdpa(None, None, device) as stats:
                row.cells, row.right = judge(run(name, dtype), theirs, expected, stats())
        yield row


# ---- two processes -----------------------------------------------------------------------------------------------------------------


#: Ways through diffusers' context parallelism: the attention backend, and the arguments of ContextParallelConfig.
PARALLEL = {
    "ring, _native_flash": ("_native_flash", {"ring_degree": 2}),
    "Ulysses, _native_flash": ("_native_flash", {"ulysses_degree": 2}),
    "ring, flash": ("flash", {"ring_degree": 2}),
    "Ulysses, flash": ("flash", {"ulysses_degree": 2}),
    "Ulysses, enable_sdpa": ("native", {"ulysses_degree": 2}),
}


def rank_main(rank: int, port: int, ways: list[tuple[str, str]], device: str, dtype: torch.dtype, queue: Any) -> None:
    """Runs (model, way) pairs in one of two processes. Rank 0 puts (model, way, result) of each into the queue, rank 1 errors alone."""
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    if device == "cpu":  # diffusers asks for accelerators
        torch.accelerator.device_count = lambda: 1
    for name, way in ways:
        try:
            result = run_in_parallel(name, way, device, dtype)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        if rank == 0 or isinstance(result, str):
            queue.put((name, way, result))
        if isinstance(result, str):
            break  # the other process waits in a collective
    dist.destroy_process_group()


def run_in_parallel(name: str, way: str, device: str, dtype: torch.dtype) -> tuple[Any, Any, dict[str, Any]]:
    """Returns the output and the gradient of the input, as NumPy's arrays for the queue, and the counts of calls."""
    import torch.distributed as dist

    model = next(model for model in SMALL if model.name == name)
    module, inputs = build(model, device)
    module = module.to(dtype)
    backend, degrees = PARALLEL[way]
    shape = (degrees.get("ring_degree", 1), degrees.get("ulysses_degree", 1))
    mesh = dist.init_device_mesh(device, shape, mesh_dim_names=("ring", "ulysses"))
    with registered() if backend == "_native_flash" else nullcontext():
        module.set_attention_backend(backend)
        module.enable_parallelism(config=diffusers.ContextParallelConfig(**degrees, mesh=mesh))
        with sdpa(module, model, device) if backend == "native" else counted_op() as stats:
            out, gradient = forward_backward(module, inputs, dtype)
            dist.all_reduce(gradient)  # each process has that of its part of the input
            return out.cpu().numpy(), gradient.cpu().numpy(), stats()


def in_two_processes(device: str, dtype: torch.dtype, wanted: Callable[[str, str], bool]) -> Iterator[Row]:
    """Yields the rows of diffusers' context parallelism."""
    import torch.multiprocessing as multiprocessing

    models = {model.name: model for model in SMALL if model.parallel}
    ways = [(name, way) for name in models for way in PARALLEL if wanted(name, way)]
    if not ways:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = multiprocessing.get_context("spawn").Queue()
    processes = multiprocessing.spawn(rank_main, (port, ways, device, dtype, queue), nprocs=2, join=False)
    try:
        references: dict[str, Any] = {}
        for name, way in ways:
            row = Row(name, way)
            with noted(row):
                *_, result = queue.get(timeout=180)
                if isinstance(result, str):
                    raise RuntimeError(result)
                if name not in references:
                    module, inputs = build(models[name], device)
                    expected = forward_backward(copy.deepcopy(module).double(), inputs, torch.float64)
                    with memory_efficient(module, models[name], device):
                        references[name] = forward_backward(module.to(dtype), inputs, dtype), expected
                found = tuple(torch.from_numpy(array).to(device) for array in result[:2])
                row.cells, row.right = judge(found, *references[name], result[2])
            yield row
            if "note" in row.cells:  # the processes have ended, or one waits for the other
                return
    finally:
        for process in processes.processes:
            process.join(10)
            process.kill()


# ---- times ---------------------------------------------------------------------------------------------------------------------


#: Rounds of timing; the first is to warm up.
ROUNDS = 4
TIMED = {"PyTorch": native, "PyTorch, memory-efficient": memory_efficient, "enable_sdpa": sdpa, "flash": flash, "enable_xformers": xformers}


def timed(model: Model, dtype: torch.dtype, wanted: Callable[[str, str], bool]) -> Iterator[Row]:
    """Yields the rows of a model of real width: median time and peak memory of a forward pass. The ways take turns."""
    ways = {way: enter for way, enter in TIMED.items() if wanted(model.name, way)}
    if not ways:
        return
    module, inputs = build(model, "cuda")
    module, inputs = module.to(dtype), cast(inputs, dtype)
    rows = {name: Row(model.name, name) for name in ways}
    times: dict[str, list[float]] = {name: [] for name in ways}
    first: torch.Tensor | None = None
    with torch.no_grad():
        for turn in range(ROUNDS):
            for name, way in ways.items():
                row = rows[name]
                if "note" in row.cells:
                    continue
                with noted(row):
                    with way(module, model, "cuda") as stats:
                        out = forward(module, inputs)  # compiles, warms up
                        counts = stats()  # ends the profile of some ways
                        torch.cuda.synchronize()
                        held = torch.cuda.memory_allocated()
                        torch.cuda.reset_peak_memory_stats()
                        for _ in range(3 if turn else 1):
                            begin = time.perf_counter()
                            out = forward(module, inputs)
                            torch.cuda.synchronize()
                            times[name].append(time.perf_counter() - begin)
                        peak = torch.cuda.max_memory_allocated() - held
                    first = out.double() if first is None else first
                    row.cells = {"ms": "", "peak MiB": f"{peak / 2**20:.0f}", "to PyTorch": f"{relative(out.double(), first):.1e}"}
                    row.cells |= {"ran": str(counts.get("ran", 0)), "fell back": fallen(counts)}
    for name, row in rows.items():
        if "ms" in row.cells:
            found = sorted(times[name][1:])  # without the first round
            row.cells["ms"] = f"{1000 * found[len(found) // 2]:.1f}"
        yield row


# ---- the program -----------------------------------------------------------------------------------------------------------------


def show(rows: Iterator[Row], title: str) -> bool:
    """Prints a table as its rows come. Returns True if all are right."""
    columns: list[str] = []
    right = True
    print(f"\n{title}")
    for row in rows:
        if set(row.cells) - {"note"} - set(columns):
            columns = [name for name in row.cells if name != "note"]
            print(f"{'model':26}{'way':27}" + "".join(f"{name.strip():>12}" for name in columns))
        if "note" in row.cells:
            text = ("" if row.right else "WRONG  ") + row.cells["note"][:200]
        else:
            text = "".join(f"{row.cells.get(name, ''):>12}" for name in columns) + ("" if row.right else "  WRONG")
        print(f"{row.model:26}{row.way:27}{text}", flush=True)
        right = right and row.right
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=["float16", "float32"], help="default: float32 on the CPU, float16 on CUDA")
    parser.add_argument("--only", default="", help="comma-separated parts of the names of models or ways, or patterns MODEL/WAY")
    parser.add_argument("--no-times", action="store_true", help="on CUDA, leave the models of real width out")
    parser.add_argument("--no-processes", action="store_true", help="leave context parallelism out")
    arguments = parser.parse_args()
    device, words = arguments.device, [word for word in arguments.only.split(",") if word]
    dtype = getattr(torch, arguments.dtype or ("float32" if device == "cpu" else "float16"))

    def wanted(model: str, way: str) -> bool:
        return not words or any(fnmatch(f"{model}/{way}", word) if "/" in word else word in model or word in way for word in words)

    torch.backends.cudnn.allow_tf32 = False  # convolutions of float32 models would round more than any attention
    where = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    has_xformers = attention_dispatch._CAN_USE_XFORMERS_ATTN
    if not has_xformers:
        WAYS.pop("enable_xformers"), TIMED.pop("enable_xformers")
    versions = f"diffusers {diffusers.__version__}, torch {torch.__version__}, volta_fa {volta_fa.__version__}"
    versions += f", xformers {importlib.import_module('xformers').__version__}" if has_xformers else ", no xformers"
    print(f"{versions}, {where}, {dtype}")
    right = show((row for model in SMALL for row in compare(model, device, dtype, wanted)), "Small models, forward and backward")
    right &= show(pipelines(device, dtype, wanted), "Pipelines, two steps")
    if device == "cuda" and not arguments.no_times:
        right &= show((row for model in LARGE for row in timed(model, dtype, wanted)), "Models of real width, forward")
    if device == "cuda" and torch.cuda.device_count() < 2:
        print("\nTwo processes: left out, because they need two GPUs; `--device cpu` runs them on gloo")
    elif not arguments.no_processes:
        right &= show(in_two_processes(device, dtype, wanted), "Two processes")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
