"""Runs vLLM engines with volta_fa and with vLLM's own backends, and compares their tokens. Needs a GPU, and no network.

    PYTHONPATH=python python tools/gpu/vllm_engine/run.py PACKS OUTPUT                      all versions in PACKS and --work
    PYTHONPATH=python python tools/gpu/vllm_engine/run.py PACKS OUTPUT --versions 0.33.0 --slots 10 --minutes 10 --time-limit 900
    PYTHONPATH=python python tools/gpu/vllm_engine/run.py PACKS OUTPUT --only load,llama128-custom

PACKS has the archives of prepare.py. Engines run side by side. Each takes 2 GB of GPU memory and more, about a minute to start, and 5 GB
of host memory. Writes results and logs to OUTPUT/VERSION, prints compare.py's summary, and exits with its status."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import compare
from jobs import FORK, NEWEST, jobs

#: Kinds of jobs that start `vllm serve` (load.py). The others run in an engine (engine.py).
SERVED = ("load", "server")
HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
#: FlashAttention 3's library, which prepare.py packs for some versions.
FA3 = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"


def write_plugin(folder: Path) -> None:
    """Writes metadata as an installed volta_fa has, by which vLLM finds the plugin."""
    about = folder / "volta_fa-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: volta-fa\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nvolta_fa = volta_fa.vllm:register\n")


def environment(job: dict, work: Path) -> dict[str, str]:
    """Returns the environment of an engine: without network, with caches of its own."""
    path = [work / "plugin", REPOSITORY / "python", work / f"vllm-{job['version']}", work / "site"]
    fixed = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "CUDA_CACHE_PATH": str(work / "cuda-cache"),
        "CUDA_CACHE_MAXSIZE": str(4 << 30),
        "TRITON_CACHE_DIR": str(work / "triton-cache"),
        "VLLM_CACHE_ROOT": str(work / "vllm-cache" / job["version"] / job["name"]),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # it uses NVLink multicast, which a host with other guests may forbid
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        "OMP_NUM_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
    }
    if job["kind"] not in SERVED:
        # the engine then runs in engine.py's own process
        fixed["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return {**os.environ, **fixed, **job.get("env", {})}


def files_of(job: dict, options) -> list[Path]:
    """Returns the paths of a job's files: NAME.job.json, which this writes; NAME.json, the result, which this removes; NAME.log."""
    folder = options.output / job["version"]
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{job['name']}{end}" for end in (".job.json", ".json", ".log")]
    files[0].write_text(json.dumps(job))
    files[1].unlink(missing_ok=True)
    return files


class Job:
    """A running job of jobs.py: a process of engine.py or load.py, and its files (files_of)."""

    def __init__(self, job: dict, options) -> None:
        self.job, self.begin = job, time.time()
        files = files_of(job, options)
        script = "load.py" if job["kind"] in SERVED else "engine.py"
        command = [sys.executable, str(HERE / script), *map(str, files[:2]), str(options.work / "models")]
        if job["kind"] == "load":
            command += ["--minutes", str(options.minutes)]
        with files[2].open("w") as log:
            streams = {"stdout": log, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(command, env=environment(job, options.work), start_new_session=True, **streams)

    def end(self) -> None:
        """Ends what is left of the job's processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_all(waiting: list[dict], options) -> None:
    """Runs jobs side by side until the time limit."""
    begin, running = time.time(), []
    while waiting or running:
        late = time.time() - begin > options.time_limit
        if late:
            for job in waiting:  # a job without a result counts as failed
                files_of(job, options)[2].write_text("not started before the time limit\n")
            waiting = []
        while waiting and len(running) < options.slots:
            running.append(Job(waiting.pop(0), options))
        for job in list(running):
            status = job.process.poll()
            if status is not None or late:
                job.end()
                running.remove(job)
                state = "stopped by the time limit" if status is None else "done" if status == 0 else f"FAILED with {status}"
                name = f"{job.job['version']} {job.job['name']}"
                print(f"[{time.time() - begin:5.0f} s] {name}: {state}, {time.time() - job.begin:.0f} s", file=sys.stderr, flush=True)
        time.sleep(0.2)


def main() -> int:
    """Unpacks, writes models, runs and compares. Returns 0 if all is right, else 1."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--versions", nargs="*", help="(default: all in PACKS, and those unpacked in --work)")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of jobs, comma-separated")
    parser.add_argument("--slots", type=int, default=8, help="engines at a time (%(default)s)")
    parser.add_argument("--minutes", type=float, default=2.5, help="duration of the mixed load (%(default)s)")
    parser.add_argument("--time-limit", type=float, default=900, help="seconds after which no engine runs (%(default)s)")
    parser.add_argument("--work", type=Path, default=Path("/tmp/vllm_engine_run"), help="for unpacked files and caches (%(default)s)")
    options = parser.parse_args()
    options.output, options.work = options.output.resolve(), options.work.resolve()
    write_plugin(options.work / "plugin")
    begin = time.time()
    unpacking = [subprocess.Popen(["tar", "-xJf", str(path), "-C", str(options.work)]) for path in options.packs.glob("*.tar.xz")]
    # the jobs of vLLM's newest release have all models of the others; FORK is 1Cat-vLLM
    known = jobs(NEWEST, flash_attention=True) + jobs(FORK, flash_attention=False)
    models = {j["model"] for j in known if not options.only or j["name"] in options.only}
    subprocess.run([sys.executable, str(HERE / "models.py"), str(options.work / "models"), *models], check=True)
    if sum(process.wait() for process in unpacking):
        raise SystemExit("tar: got an archive that does not unpack, expected those of prepare.py")
    print(f"unpacked, and models written: {time.time() - begin:.0f} s", file=sys.stderr, flush=True)
    versions = options.versions or [path.name.removeprefix("vllm-") for path in sorted(options.work.glob("vllm-[0-9]*"), reverse=True)]
    found = [j for v in versions for j in jobs(v, (options.work / f"vllm-{v}/{FA3}").exists())]
    found = [job for job in found if not options.only or job["name"] in options.only]
    found.sort(key=lambda job: job["kind"] not in SERVED)  # servers first: they take longest
    gpus = max(torch.cuda.device_count(), 1)
    for job in found:
        if job.get("gpus", 1) > gpus:
            why = f"it needs {job['gpus']} GPUs and this machine has {gpus}"
            print(f"{job['version']} {job['name']}: did not run, because {why}", file=sys.stderr)
    run_all([job for job in found if job.get("gpus", 1) <= gpus], options)
    for version in versions:  # measures errors against transformers in float32, while no engine runs
        command = [sys.executable, str(HERE / "reference.py"), str(options.output / version), str(options.work / "models")]
        subprocess.run(command, check=False)
    return compare.report(options.output)


if __name__ == "__main__":
    sys.exit(main())
