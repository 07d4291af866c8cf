"""Attention over sequences that are sharded over processes: gloo on the CPU.

The cases are in distributed_worker.py: processes cost seconds each, so all of a number of ranks run in the same ones.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from conftest import INFO, LIBRARY, REPOSITORY, run_python

pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or os.name != "posix", reason="no torch.distributed with gloo")
WORKER = REPOSITORY / "tests" / "distributed_worker.py"
#: An hour of a busy machine would be a hang.
LIMIT = 500


def run_ranks(folder, size: int, *names: str, program=WORKER, limit: float = LIMIT, **environment) -> list[dict]:
    """What each rank's process wrote."""
    path = os.pathsep.join(filter(None, [str(LIBRARY.parents[2]), os.environ.get("PYTHONPATH")]))
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    master = {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path, **master, **environment}
    ranks = []
    for rank in range(size):
        with (folder / f"{rank}.log").open("w") as log:
            command = [sys.executable, str(program), str(rank), str(size), str(folder), *names]
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [rank.wait(limit) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, code in enumerate(codes):
        assert (folder / f"{rank}.json").exists(), f"rank {rank}: exit status {code}: {(folder / f'{rank}.log').read_text()[-2000:]}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


SIZES = [("gloo", 2), *(pytest.param("gloo", size, marks=pytest.mark.slow) for size in (1, 3, 4))]


@pytest.mark.parametrize("backend, size", [*SIZES, pytest.param("nccl", 2, marks=pytest.mark.cuda)])
def test_ranks(tmp_path, backend, size):
    """All cases of so many ranks."""
    if not INFO["simulator"]:
        pytest.skip("this library was built without the simulator (cargo feature `sim`)")
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    found = run_ranks(tmp_path, size, VOLTA_FA_TEST_NCCL=str(int(backend == "nccl")))
    failures = [f"rank {rank}, {name}: {text}" for rank, cases in enumerate(found) for name, text in cases.items()]
    assert not failures, "\n".join(failures)


def test_importing_the_package_imports_no_distribution():
    """`import volta_fa` stays as quick as it is."""
    code = "import sys, {}; print(sorted(m for m in sys.modules if m.startswith(('volta_fa.distributed', 'torch.distributed'))))"
    assert run_python(code.format("volta_fa")) == run_python(code.format("torch"))
