"""Fixtures and helpers of all Python tests. The `backend` fixture runs a test several ways, which `on(...)` or `on_cases(...)` list:

- `cpu-fp32`, `cpu-fp64`, `cpu-bf16`, `cpu-fp16`: the CPU backend;
- `sim`: the sm_70 machine code in the simulator (tools/volta-sim; VOLTA_FA_SIM_GPU selects another GPU's), on fp16 CPU tensors, in two
  warp orders;
- `cuda`: the kernels on the GPU of this machine, fp16 (on GPUs without matching machine code: PTX);
- `sim-bf16`, `cuda-bf16`, `sim-fp32`, `cuda-fp32`: the same, on tensors of these dtypes.

`backend` draws tensors in its dtype on its device; after `backend.simulate()` the simulator, if it is the backend, runs all calls. The
fixture `gpu` runs a test for a simulated V100 and a T4, `force` makes the planner take or avoid kernels.

`check` compares an attention call and its gradients with the fp64 reference, `check_case` those of a Case; `judge` and `within` compare
single results.

Environment:
- VOLTA_FA_TEST_LIBRARY: the library to test, instead of the one in python/volta_fa or the installed package's
- VOLTA_FA_TEST_SEED: changes all random inputs (default 0)
- VOLTA_FA_TEST_EXAMPLES: number of random problems of each test of combinations (default: the test's own number)
- VOLTA_FA_TEST_REQUIRE: backends, as `sim,cuda`, that must run: tests fail instead of skip where one cannot

`make test` runs the tests that are not marked `slow`: on a simulated GPU a quarter of a test's cases, but at least MIN_SIMULATED_CASES.
`make test-all` runs all. Both use several processes (pytest-xdist's `-n auto`), or one if there is a GPU. A test marked `alone` runs while
no other test does."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import textwrap
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import pytest
import torch
from torch import Tensor

import reference
from processes import REPOSITORY, run_forked

#: A problem of `fwd` and `bwd`: sizes and options. `case.problem(backend)` draws its tensors (volta_fa/check/cases.py).
Case = reference.cases.Case
# Ignore this machine's tuning files (`python -m volta_fa check --tune`): the tests expect the planner's own choices.
os.environ["VOLTA_FA_TUNING"] = "0"
# Processes of the tests share the disassembly of kernels.
os.environ.setdefault("VOLTA_SIM_LISTINGS", str(REPOSITORY / "target" / "volta-sim-listings"))


def _load_library() -> Path:
    """Loads VOLTA_FA_TEST_LIBRARY, else the checkout's build, which has the simulator, else the installed package."""
    package = REPOSITORY / "python" / "volta_fa"
    named = os.environ.get("VOLTA_FA_TEST_LIBRARY")
    if named:
        torch.ops.load_library(named)
        return Path(named)
    if (package / "libvolta_fa_core.so").exists():
        sys.path.insert(0, str(package.parent))
    import volta_fa

    return volta_fa.library_path()


LIBRARY = _load_library()
#: The core library, which contains the kernels.
CORE = LIBRARY.parents[1] / "libvolta_fa_core.so"
#: Facts of the library: `variants` (a dict for each kernel), `simulator` (whether it is built in), `limits` and others.
INFO = json.loads(torch.ops.volta_fa._info())
HAS_CUDA = torch.cuda.is_available()
#: The simulator's GPUs, by compute capability (sm_70, sm_75).
GPUS = {70: "v100", 75: "t4"}

# The Python package loads its own library, so its tests cannot test another one: pytest does not collect them.
if "VOLTA_FA_TEST_LIBRARY" in os.environ:
    packages = ("sdpa*", "flex*", "transformers*", "vllm*", "block_mask_packing", "copies", "diffusers", "unsloth")
    collect_ignore_glob = [f"test_{name}.py" for name in packages]

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
NEEDS_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")

# One thread: in small problems on a busy machine, threads that wait for each other cost ten times what they save.
# CORES is the number before, for test_cpu_speed.py.
CORES = torch.get_num_threads()
torch.set_num_threads(1)

CPU = ["cpu-fp32", "cpu-fp64", "cpu-bf16", "cpu-fp16"]
KERNELS = ["sim", "cuda"]
BF16_KERNELS = ["sim-bf16", "cuda-bf16"]
FP32_KERNELS = ["sim-fp32", "cuda-fp32"]
ALL = CPU + KERNELS
#: Simulated kernels run in two warp orders: one warp far ahead, and all in step. Each is the number of instructions (the simulator's
#: "quantum") that a warp executes before the next warp runs. Results that differ show a race.
WARP_ORDERS = (20000, 1)

hypothesis.settings.register_profile("default", derandomize="CI" in os.environ, deadline=None, print_blob=True)
hypothesis.settings.load_profile("default")


def run_process(code: str, *arguments, fresh=False, **environment) -> subprocess.CompletedProcess:
    """Runs a program that can import the package under test, in a fork of a process with torch; `fresh`: in a new interpreter."""
    command = ["-c", textwrap.dedent(code), *map(str, arguments)]
    path = os.pathsep.join(filter(None, [str(LIBRARY.parents[2]), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, **environment}
    if fresh:
        result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, env=env)
    else:
        result = run_forked(command, env)
    assert result.returncode == 0, result.stderr
    return result


def run_python(code: str, *arguments, fresh=False, **environment) -> str:
    """Runs a program as run_process does and returns its stdout."""
    return run_process(code, *arguments, fresh=fresh, **environment).stdout.strip()


def _unavailable(backend: str) -> str | None:
    """Returns why this machine or build cannot run a backend; None if it can."""
    if backend == "sim" and not INFO["simulator"]:
        return "this library was built without the simulator (cargo feature `sim`)"
    if backend == "sim" and not INFO["variants"]:
        return "this library has no kernels"
    if backend == "cuda" and not HAS_CUDA:
        return "no GPU"
    if backend == "cuda" and torch.cuda.get_device_capability() < (7, 0):
        return "the GPU is older than compute capability 7.0"
    return None


def _machine(backend: str) -> str:
    """Returns what runs a backend: `sim` or `cuda` without the dtype, or a CPU backend's own name."""
    return backend.partition("-")[0] if backend in BF16_KERNELS + FP32_KERNELS else backend


def need(backend: str):
    """Skips the test if this machine or build cannot run the backend; fails it if VOLTA_FA_TEST_REQUIRE names the backend."""
    machine = _machine(backend)
    reason = _unavailable(machine)
    if reason and machine in os.environ.get("VOLTA_FA_TEST_REQUIRE", "").split(","):
        pytest.fail(f"{backend} was required, but {reason}")
    if reason:
        pytest.skip(reason)


def on(*backends: str, slow: tuple[str, ...] = ()):
    """Parametrizes a test over backends. `make test` skips those in `slow`."""
    params = [*map(_param, backends), *(_param(b, slow=True) for b in slow)]
    return pytest.mark.parametrize("backend", params, indirect=True)


def on_cases(*pairs: tuple[list[str], list], slow: tuple[tuple[list[str], list], ...] = ()):
    """Parametrizes a test over `backend` and `case`. A pair is (backends, cases): each of these cases on each of these backends.
    `make test` skips what only `slow` has."""
    seen, params = set(), []
    for number, (backends, cases) in enumerate((*pairs, *slow)):
        for case in cases:
            for b in backends:
                name = f"{b}-{case}"
                if name not in seen:
                    seen.add(name)
                    params.append(_param(b, case, name=name, slow=number >= len(pairs)))
    return pytest.mark.parametrize("backend,case", params, indirect=["backend"])


def _param(backend: str, *rest, name: str | None = None, slow: bool = False):
    marks = [pytest.mark.cuda] * backend.startswith("cuda") + [pytest.mark.slow] * slow
    return pytest.param(backend, *rest, id=name or backend, marks=marks)


@dataclass
class Backend:
    """A way to run the ops: where tensors live, and how often and in which environment a call runs."""

    name: str
    seed: int
    monkeypatch: pytest.MonkeyPatch
    #: True: the forward pass runs on the CPU, for tests of the backward pass alone.
    forward_on_cpu: bool = False
    device: str = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self):
        self.device = "cuda" if self.machine == "cuda" else "cpu"
        of_name = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
        self.dtype = of_name.get(self.name.rpartition("-")[2], torch.float16)
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    @property
    def machine(self) -> str:
        """What runs the ops: `sim`, `cuda` or a CPU backend's own name."""
        return _machine(self.name)

    @property
    def kernels(self) -> bool:
        """Whether the GPU kernels' code runs: in the simulator or on a GPU."""
        return self.machine in KERNELS

    def randn(self, *shape: int, spread: float = 1.0) -> Tensor:
        """Returns normal numbers with this standard deviation, in the backend's dtype."""
        t = torch.randn(*shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return (t * spread).to(self.dtype)

    def ints(self, values) -> Tensor:
        """Returns these numbers as int32 on the device."""
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def forward(self, q, k, v, **options) -> tuple[Tensor, Tensor]:
        """Returns out and softmax_lse."""
        return self.forward_and_state(q, k, v, **options)[:2]

    def forward_and_state(self, q, k, v, **options) -> tuple[Tensor, Tensor, Tensor]:
        """Returns fwd's results. Kernels run twice (simulator: in both warp orders); results must be bitwise identical."""

        if self.forward_on_cpu:
            state = torch.Generator().manual_seed(self.seed)
            given = {name: t.cpu() if isinstance(t, Tensor) else t for name, t in options.items()}
            return tuple(t.to(self.device) for t in torch.ops.volta_fa.fwd(q.cpu(), k.cpu(), v.cpu(), generator=state, **given))

        def run():
            # runs of one problem draw the same numbers
            options["generator"] = torch.Generator(self.device).manual_seed(self.seed)
            return torch.ops.volta_fa.fwd(q, k, v, **options)

        return agreed([run() for _ in self._runs(q, v)], "out", "softmax_lse", "rng_state")

    def backward(self, dout, q, k, v, out, softmax_lse, **options) -> list[tuple[Tensor, ...]]:
        """Returns the gradients of each run, as `reference.gradient_names` lists them.

        Kernels accumulate dq and dattn_bias with atomics unless `deterministic`. All else must be bitwise identical."""
        names = reference.gradient_names(**options)
        unordered = set() if options.get("deterministic") else {"dq", "dattn_bias"}

        def run():
            found = torch.ops.volta_fa.bwd(dout, q, k, v, out, softmax_lse, attn_bias_requires_grad="dattn_bias" in names, **options)
            found = dict(zip(("dq", "dk", "dv", "dattn_bias", "dsinks"), found))
            assert all(t.shape == (0,) for name, t in found.items() if name not in names)
            return tuple(found[name] for name in names)

        runs = [run() for _ in self._runs(q, k, v)]
        for other in runs[1:]:
            for name, a, b in zip(names, runs[0], other):
                if name not in unordered:
                    assert_same_bits(name, a, b)
        return runs

    def results(self, q, k, v, dout, **options) -> list[Tensor]:
        """Returns out, softmax_lse and the gradients of a `deterministic` backward pass, which are bitwise repeatable."""
        out, lse, rng_state = self.forward_and_state(q, k, v, **options)
        if rng_state.numel():
            options["rng_state"] = rng_state
        return [out, lse, *self.backward(dout, q, k, v, out, lse, deterministic=True, **options)[0]]

    def simulate(self, how: str = "1"):
        """Simulates later calls, if the backend is the simulator, and clears its report. `how`, VOLTA_FA_SIMULATE's value: `1` runs
        kernels, `timing` also times and reports each launch, `launches` only reports kernels and grids."""
        if self.machine == "sim":
            self.monkeypatch.setenv("VOLTA_FA_SIMULATE", how)
            torch.ops.volta_fa._sim_report()

    def launches(self, call: Callable, how: str = "timing") -> list[dict]:
        """Returns the simulator's report of each kernel launch of a call. `how`: as for `simulate`."""
        self.simulate(how)
        call()
        self.monkeypatch.delenv("VOLTA_FA_SIMULATE")
        return json.loads(torch.ops.volta_fa._sim_report())

    def on_gpu(self, name: str):
        """Simulates this GPU (`v100` or `t4`). Other backends have one GPU, so they skip the test for all but `v100`."""
        if self.machine == "sim":
            self.monkeypatch.setenv("VOLTA_FA_SIM_GPU", name)
        elif name != "v100":
            pytest.skip("the simulator alone has several GPUs")

    def _runs(self, *like: Tensor):
        """Yields once per run of a call: for each warp order in the simulator, twice on a GPU, with NaN in memory for the results."""
        if self.machine == "sim":
            self.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
            for quantum in WARP_ORDERS:
                self.monkeypatch.setenv("VOLTA_FA_SIM_QUANTUM", str(quantum))
                yield  # the simulator itself fills outputs and scratch with NaN
            self.monkeypatch.delenv("VOLTA_FA_SIMULATE")
        elif self.machine == "cuda":
            for _ in range(2):
                poison_cuda(*like)
                yield
        else:
            yield


def poison_cuda(*like: Tensor):
    """Leaves NaN in the memory that the caching allocator hands out next, for results like `like`: a kernel that does not write an element
    returns NaN. Integers get -1, whose bytes are NaN in other types."""
    held = []
    for t in like:
        poison = float("nan") if t.is_floating_point() else -1
        for copies in (1, 1, 2, 4):  # the allocator reuses blocks by size, and a result may be larger than its input
            held.append(torch.full((t.numel() * copies,), poison, dtype=t.dtype, device=t.device))
        rows = t.numel() // max(t.shape[-1], 1)  # softmax_lse has one fp32 number per row
        held.append(torch.full((max(rows, 1),), float("nan"), device=t.device))
    del held


def assert_same_bits(name: str, a: Tensor, b: Tensor):
    """Compares as integers of the same size, because NaN differs from itself."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    different = (a.contiguous().view(ints) != b.contiguous().view(ints)).sum().item()
    assert different == 0, f"{name}: {different} of {a.numel()} elements differ between two runs: a race"


def agreed(runs: list, *names: str):
    """Returns the first of several runs' results, which must be bitwise identical. `names`: of results, by default fwd_kvcache's."""
    names = names or ("out", "softmax_lse", "k_cache", "v_cache")
    for other in runs[1:]:
        for name, a, b in zip(names, runs[0], other):
            assert_same_bits(name, a, b)
    return runs[0]


def ops_called(profiler) -> set[str]:
    """Names of the ops in a profile, without those that an op of volta_fa calls: its CPU backend runs ATen's attention."""

    def is_inside(event) -> bool:
        parent = event.cpu_parent
        return parent is not None and (parent.name.startswith("volta_fa::") or is_inside(parent))

    return {event.name for event in profiler.events() if not is_inside(event)}


def reads_no_value(call: Callable, *ops: str):
    """Checks that a call runs these operators and reads no value on the host, as CUDA graphs need it."""
    with torch.profiler.profile() as profiler:
        call()
    called = {event.name for event in profiler.events()}
    assert called >= {*ops}
    assert not called & {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"}


def captured(step: Callable, *generators: torch.Generator) -> tuple:
    """Returns the CUDA graph of a step, and the results that replays overwrite. `generators`: those of the step beside torch's own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # PyTorch asks for a run on a side stream before a capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        return graph, step()


def seed_of(name: str) -> int:
    """Returns the seed of a test's random inputs, from its name and VOLTA_FA_TEST_SEED."""
    return zlib.crc32(f"{name}:{os.environ.get('VOLTA_FA_TEST_SEED', '0')}".encode())


@pytest.fixture
def backend(request, monkeypatch) -> Backend:
    need(request.param)
    monkeypatch.delenv("VOLTA_FA_SIMULATE", raising=False)
    return Backend(request.param, seed_of(request.node.nodeid), monkeypatch)


@pytest.fixture
def force():
    """Makes the planner avoid the `failed` kernels (names) and take `choices` (each a dict of pass and variant), until the test ends."""

    def set_tuning(failed=(), choices=()):
        torch.ops.volta_fa._set_tuning(json.dumps({"format": 1, "failed": list(failed), "choices": list(choices)}))

    yield set_tuning
    torch.ops.volta_fa._set_tuning("")


@pytest.fixture(params=["v100", "t4"])
def gpu(request, backend) -> str:
    """Runs simulated kernels of each family, and other backends once."""
    backend.on_gpu(request.param)
    return request.param


# ---- error budgets: the largest allowed errors of a result, from the errors of eager attention in the same dtype ----

#: Largest error / allowed error of each (backend, result, kind: the largest or the rms error) in this session, with its test.
_worst: dict[tuple[str, str, str], tuple[float, str]] = defaultdict(lambda: (0.0, ""))


def within(backend: Backend, what: str, found: Tensor, expected: Tensor, budget: reference.tolerance.Budget):
    """Checks the errors of one result against a budget."""
    judge(backend, [reference.problems.Part(what, lambda t: t, expected, budget)], {what: found})


def judge(backend: Backend, parts, results: dict[str, Tensor]):
    """Checks results by name. Each part (`volta_fa.check.problems.Part`) selects some elements and has their exact values and budget. An
    error's `kind` is the largest or the rms error; its `share` is error / allowed error."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
    for part in parts:
        for error in part.errors(results):
            key = backend.name, error.result, error.kind
            _worst[key] = max(_worst[key], (error.share, test))
            assert error.share <= 1, str(error)


def check(backend: Backend, q, k, v, dout=None, deterministic=False, dlse=None, **options):
    """Checks forward, and with `dout` backward, against the fp64 reference. `dlse` is the gradient of softmax_lse.

    Returns out and softmax_lse, and the gradients of the last run. Batch entries of one length form a part with a budget of its own."""
    out, lse, rng_state = backend.forward_and_state(q, k, v, **options)
    check_form(q, v.shape[-1], out, lse)
    exact = reference.exact(q, k, v, rng_state, **options)
    judge(backend, exact.forward(), {"out": out, "softmax_lse": lse})
    if dout is None:
        return out, lse
    if rng_state.numel():
        options["rng_state"] = rng_state
    gradient = {} if dlse is None else {"dlse": dlse}
    runs = backend.backward(dout, q, k, v, out, lse, deterministic=deterministic, **options, **gradient)
    parts, names = exact.backward(dout, out, dlse), reference.gradient_names(**options)
    for gradients in runs:
        # after dq, dk and dv: dattn_bias and dsinks, the names of options after a "d"
        for name, t, g in zip(names, (q, k, v, *(options[name[1:]] for name in names[3:])), gradients):
            assert g.shape == t.shape and g.dtype == t.dtype, name
        judge(backend, parts, dict(zip(names, gradients)))
    return out, lse, *runs[-1]


def check_case(backend: Backend, case: Case, **changes):
    """Checks a Case as `check` does. `changes` replace its tensors and options: with dout=None the forward pass alone is checked."""
    (q, k, v, dout), options = case.problem(backend)
    return check(backend, q, k, v, **{"dout": dout, "deterministic": case.deterministic, **options, **changes})


def check_form(q: Tensor, headdim_v: int, out: Tensor, lse: Tensor):
    """Checks shapes, dtypes and strides of what an op returns for q."""
    assert out.shape == (*q.shape[:-1], headdim_v) and out.dtype == q.dtype and out.is_contiguous()
    rows, nheads = q.shape[:-2], q.shape[-2]
    assert lse.shape == (*rows[:-1], nheads, rows[-1]) and lse.dtype == torch.float32 and lse.is_contiguous()


def repeat(name: str, case: Case, deterministic: bool = False):
    """Checks one case (`check`, forward and backward) on the backend `name`. If it fails, prints a shell command that repeats it."""
    need(name)
    with pytest.MonkeyPatch.context() as monkeypatch:
        backend = Backend(name, seed_of(repr(case)), monkeypatch)
        try:
            check_case(backend, case, deterministic=deterministic)
        except Exception:
            seed = os.environ.get("VOLTA_FA_TEST_SEED", "0")
            call = f"repeat({name!r}, {case!r}, {deterministic})"
            print(f'to repeat: cd tests && VOLTA_FA_TEST_SEED={seed} python -c "from conftest import *; {call}"')
            raise


# ---- several processes -----------------------------------------------------------------------------------------

#: Most processes of pytest-xdist's `-n auto`: each imports torch and holds about 1 GiB.
MAX_PROCESSES = 8
#: Minimum cases of a test on a simulated GPU in `make test`. Of more than four times as many, a quarter runs.
MIN_SIMULATED_CASES = 6


def usable_cpus() -> int:
    """CPUs that this process may use: by its affinity and by its control group's quota."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cpus, max(int(quota) // int(period), 1))
    except (OSError, ValueError):  # another kind of control group; no quota
        return cpus


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config) -> int | None:
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None  # pytest-xdist heeds it
    return 0 if HAS_CUDA else min(usable_cpus(), MAX_PROCESSES)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m excludes
def pytest_collection_modifyitems(items):
    """Marks most cases on a simulated GPU as slow, of tests that have many. Runs `alone` tests first, then slow ones, so that no long test
    runs by itself at the end."""
    simulated = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and "sim" in item.callspec.id.split("-") and not item.get_closest_marker("slow"):
            simulated[item.function].append(item)
    for cases in simulated.values():
        cases.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))  # any, but always the same
        for item in cases[max(MIN_SIMULATED_CASES, len(cases) // 4) :]:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: 0 if item.get_closest_marker("alone") else 1 if item.get_closest_marker("slow") else 2)


@pytest.fixture(autouse=True)
def _among_processes(request, tmp_path_factory):
    """Holds a lock that processes share, and that an `alone` test takes exclusively."""
    if not hasattr(request.config, "workerinput"):
        yield
        return
    folder = tmp_path_factory.getbasetemp().parent  # of all processes
    how = fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH
    with open(folder / "tests.lock", "w") as lock:
        # a waiting test blocks new ones; else some test always runs, and an `alone` test waits forever
        with open(folder / "next.lock", "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            fcntl.flock(lock, how)
        yield


def pytest_sessionfinish(session):
    """Sends the errors found in this pytest-xdist process to the one that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["worst"] = [(*key, *found) for key, found in _worst.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    for *key, share, test in getattr(node, "workeroutput", {}).get("worst", []):
        _worst[tuple(key)] = max(_worst[tuple(key)], (share, test))


def pytest_terminal_summary(terminalreporter):
    if _worst:
        terminalreporter.section("worst errors, as a share of what is allowed")
        for (backend, what, kind), (share, test) in sorted(_worst.items()):
            terminalreporter.write_line(f"{backend:9} {what:10} {kind:8} {share:6.1%}  {test}")
