"""Python harness for volta-sim: compile CUDA C++ with NVRTC for sm_70 and run it on the simulator.

    import volta_sim as vs
    cubin = vs.compile(open("k.cu").read(), defines={"D": 64})
    outs, report = vs.run(cubin, "my_kernel", grid=(80,), block=(128,), smem=0,
                          args=[x, np.zeros(n, np.float32), np.int32(n)])
    outs[1]            # content of args[1] after the kernel

Needs: numpy; libnvrtc.so.12 and CUDA headers from the wheels nvidia-cuda-nvrtc-cu12,
nvidia-cuda-runtime-cu12, nvidia-cuda-nvcc-cu12, nvidia-cuda-cccl-cu12 (12.x: the last with sm_70),
looked up on sys.path or under $VOLTA_SIM_CUDA_SITE; nvdisasm from $VOLTA_SIM_NVDISASM, triton or PATH.
"""

import ctypes
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent


# ---------------------------------------------------------------- locating the tools
def _sites():
    if os.environ.get("VOLTA_SIM_CUDA_SITE"):
        yield Path(os.environ["VOLTA_SIM_CUDA_SITE"])
    for p in sys.path:
        if p:
            yield Path(p)


def _wheel_file(rel):
    for s in _sites():
        f = s / "nvidia" / rel
        if f.exists():
            return f
    return None


def find_nvdisasm():
    if os.environ.get("VOLTA_SIM_NVDISASM"):
        return os.environ["VOLTA_SIM_NVDISASM"]
    spec = importlib.util.find_spec("triton")  # does not import it
    for loc in spec.submodule_search_locations if spec else []:
        f = Path(loc) / "backends/nvidia/bin/nvdisasm"
        if f.exists():
            return str(f)
    f = shutil.which("nvdisasm")
    if f:
        return f
    raise RuntimeError("nvdisasm not found: set VOLTA_SIM_NVDISASM or install triton")


@functools.cache
def simulator():
    """Path of the simulator: $VOLTA_SIM_BIN, or the workspace's binary, brought up to date by cargo."""
    if os.environ.get("VOLTA_SIM_BIN"):
        return os.environ["VOLTA_SIM_BIN"]
    subprocess.run(["cargo", "build", "--release", "--quiet", "-p", "volta-sim"], cwd=HERE, check=True)
    meta = subprocess.run(["cargo", "metadata", "--no-deps", "--format-version", "1"], cwd=HERE, check=True, capture_output=True, text=True)
    return str(Path(json.loads(meta.stdout)["target_directory"]) / "release/volta-sim")


# ---------------------------------------------------------------- NVRTC
def include_dirs():
    dirs = []
    for pkg in ("cuda_runtime", "cuda_nvcc", "cuda_cccl"):
        d = _wheel_file(f"{pkg}/include")
        if d:
            dirs.append(str(d))
    return dirs


def compile(src, includes=(), defines=None, options=(), name="kernel.cu", arch="sm_70"):
    """Compile CUDA C++ (text or a path) with NVRTC, to a cubin (bytes) for sm_70 or sm_75, or to PTX for compute_75."""
    if isinstance(src, Path) or ("\n" not in str(src) and os.path.exists(str(src))):
        name, src = os.path.basename(str(src)), Path(src).read_text()
    lib = _wheel_file("cuda_nvrtc/lib/libnvrtc.so.12")
    if lib is None:
        raise RuntimeError("libnvrtc.so.12 not found: pip install nvidia-cuda-nvrtc-cu12==12.9.86 or set VOLTA_SIM_CUDA_SITE")
    rtc = ctypes.CDLL(str(lib))
    prog = ctypes.c_void_p()
    rtc.nvrtcCreateProgram(ctypes.byref(prog), src.encode(), name.encode(), 0, None, None)
    opts = [f"--gpu-architecture={arch}", "--std=c++17"]
    opts += [f"-I{d}" for d in [*includes, *include_dirs()]]
    opts += [f"-D{k}={v}" for k, v in (defines or {}).items()]
    opts += list(options)
    arr = (ctypes.c_char_p * len(opts))(*[o.encode() for o in opts])
    rc = rtc.nvrtcCompileProgram(prog, len(opts), arr)
    n = ctypes.c_size_t()
    rtc.nvrtcGetProgramLogSize(prog, ctypes.byref(n))
    log = ctypes.create_string_buffer(n.value)
    rtc.nvrtcGetProgramLog(prog, log)
    if rc:
        raise RuntimeError("NVRTC: " + log.value.decode())
    kind = "CUBIN" if arch.startswith("sm") else "PTX"
    getattr(rtc, f"nvrtcGet{kind}Size")(prog, ctypes.byref(n))
    out = ctypes.create_string_buffer(n.value)
    getattr(rtc, f"nvrtcGet{kind}")(prog, out)
    rtc.nvrtcDestroyProgram(ctypes.byref(prog))
    return out.raw


# ---------------------------------------------------------------- running
class Struct:
    """A by-value struct parameter: raw bytes with buffer addresses patched in.
    relocs: {byte offset: array} or {byte offset: (array, byte offset in the array)}."""

    def __init__(self, data, relocs=None):
        self.data, self.relocs = bytes(data), relocs or {}


class Offset:
    """A pointer parameter into an array: Offset(array, bytes)."""

    def __init__(self, array, nbytes):
        self.array, self.nbytes = array, nbytes


_SCALARS = {np.int32: "i32", np.uint32: "u32", np.int64: "i64", np.uint64: "u64", np.float32: "f32", np.float64: "f64"}


def run(cubin, kernel, grid, block, smem=0, args=(), mode="both", flops=None, options=(), keep=None):
    """Run `kernel`. args: numpy arrays (device buffers, copied in and out), numpy scalars, Python
    ints (int32) and floats (float32), None (null pointer), Struct, Offset.
    mode: "functional", "timing" or "both".
    Returns ({argument index: array after the run}, report dict). Arrays reached only through Struct
    relocations are returned under their id()."""
    tmp = Path(keep) if keep else Path(tempfile.mkdtemp(prefix="volta-sim-"))
    tmp.mkdir(parents=True, exist_ok=True)
    try:
        (tmp / "k.cubin").write_bytes(cubin)
        bufs, names = {}, []

        def buf(a):
            if id(a) not in bufs:
                n = f"b{len(bufs)}"
                a_c = np.ascontiguousarray(a)
                a_c.tofile(tmp / f"{n}.in")
                bufs[id(a)] = (n, a)
                names.append({"name": n, "size": int(a_c.nbytes), "init": {"file": f"{n}.in"}, "out": f"{n}.out"})
            return bufs[id(a)][0]

        params, index = [], {}
        for i, a in enumerate(args):
            if isinstance(a, np.ndarray):
                params.append({"ptr": buf(a)})
                index[i] = id(a)
            elif isinstance(a, Offset):
                params.append({"ptr_at": {"buffer": buf(a.array), "offset": a.nbytes}})
                index[i] = id(a.array)
            elif a is None:
                params.append({"u64": 0})
            elif isinstance(a, Struct):
                rel = []
                for at, r in a.relocs.items():
                    arr, off = r if isinstance(r, tuple) else (r, 0)
                    rel.append({"at": at, "buffer": buf(arr), "offset": off})
                    index[id(arr)] = id(arr)
                params.append({"bytes": {"hex": a.data.hex(), "relocs": rel}})
            elif type(a) in _SCALARS:
                params.append({_SCALARS[type(a)]: a.item()})
            elif isinstance(a, (bool, int)):
                params.append({"i32": int(a)})
            elif isinstance(a, float):
                params.append({"f32": a})
            elif isinstance(a, (bytes, bytearray)):
                params.append({"bytes": {"hex": bytes(a).hex()}})
            else:
                raise TypeError(f"argument {i}: {type(a)}")
        launch = {
            "cubin": "k.cubin",
            "kernel": kernel,
            "grid": list(map(int, grid)),
            "block": list(map(int, block)),
            "smem": int(smem),
            "params": params,
            "buffers": names,
            "flops": flops,
        }
        (tmp / "launch.json").write_text(json.dumps(launch))
        flag = {"functional": ["--functional-only"], "timing": ["--timing"], "both": []}[mode]
        env = dict(os.environ, VOLTA_SIM_NVDISASM=find_nvdisasm())
        r = subprocess.run(
            [simulator(), str(tmp / "launch.json"), "--json", str(tmp / "report.json"), *flag, *map(str, options)],
            env=env,
            capture_output=True,
            text=True,
        )
        if r.returncode:
            raise RuntimeError(r.stderr.strip() or r.stdout)
        report = json.loads((tmp / "report.json").read_text())
        report["text"] = r.stdout
        data = {k: np.fromfile(tmp / f"{n}.out", dtype=a.dtype).reshape(a.shape) for k, (n, a) in bufs.items()}
        return {i: data[k] for i, k in index.items()}, report
    finally:
        if not keep:
            shutil.rmtree(tmp, ignore_errors=True)
