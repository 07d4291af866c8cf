"""`import volta_fa` costs little beyond `import torch`, and starts nothing."""

import ast
import graphlib
import importlib
import json
from pathlib import Path

import pytest

import volta_fa
from conftest import run_python

PACKAGE = Path(volta_fa.__file__).parent
LIMIT_MS = 50
RUNS = 5
TIMES = """
    import time
    times = [time.perf_counter()]
    import torch
    times.append(time.perf_counter())
    import volta_fa
    times.append(time.perf_counter())
    print(*(1e3 * (after - before) for before, after in zip(times, times[1:])))
"""


@pytest.mark.alone
def test_the_import_is_short_beside_that_of_torch():
    """The least of several, since what else the machine does only adds; a share of torch's own, where the machine is a slow one."""
    of_torch = ours = float("inf")
    for _ in range(RUNS):
        of_torch, ours = map(min, (of_torch, ours), map(float, run_python(TIMES, fresh=True).split()))
        if ours <= max(LIMIT_MS, 0.05 * of_torch):
            return
    pytest.fail(f"{ours:.0f} ms beyond torch's {of_torch:.0f} ms")


def test_the_import_starts_nothing():
    """Neither CUDA nor a search for its driver: programs that fork, or choose their devices later, import it first."""
    found = json.loads(
        run_python("""
            import json, sys, threading
            import torch
            def libraries():
                with open("/proc/self/maps") as maps:
                    return {line.split()[-1] for line in maps if ".so" in line}
            before, modules = libraries(), set(sys.modules)
            import volta_fa
            print(json.dumps({
                "started": torch.cuda.is_initialized(),
                "opened": sorted(path for path in libraries() - before),
                "threads": threading.active_count(),
                "modules": sorted(name for name in set(sys.modules) - modules if not name.startswith("volta_fa")),
            }))
        """)
    )
    assert not found["started"] and found["threads"] == 1
    ours = [path for path in found["opened"] if "/volta_fa/" in path]
    assert ours and not [path for path in found["opened"] if "libcuda" in path or "libnv" in path], found["opened"]
    # what torch leaves to those who ask for it, and takes long
    heavy = {"torch._dynamo", "torch._inductor", "triton", "transformers", "numpy.testing", "sympy", "rich", "matplotlib"}
    assert not heavy.intersection(found["modules"])


def _imported(path: Path, modules: set[str]) -> set[str]:
    """Modules of the package that a file imports at module level."""
    package = ["volta_fa", *path.relative_to(PACKAGE).parent.parts]
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            submodules = {f"{module}.{alias.name}" for alias in node.names} & modules
            found |= submodules if len(submodules) == len(node.names) else submodules | {module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


def test_modules_import_each_other_without_cycles():
    names = {path: ("volta_fa", *path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    paths = {".".join(name).removesuffix(".__init__"): path for path, name in names.items()}
    graph = {name: _imported(path, set(paths)) for name, path in paths.items()}
    assert {"volta_fa.inspection", "volta_fa.integrations.torch_flash_impl"} <= graph["volta_fa"]
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize(
    "path",
    [
        "bert_padding.unpad_input",
        "distributed.ring_attention",
        "flash_mla.flash_mla_with_kvcache",
        "inspection.info",
        "rotary.RotaryEmbedding",
        "sageattention.sageattn",
        "vllm.register",
    ],
)
def test_public_import_paths(path):
    """Users import these names from here, wherever the code lies."""
    module, name = path.split(".")
    assert callable(getattr(importlib.import_module(f"volta_fa.{module}"), name))
