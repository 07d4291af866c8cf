"""HMMA.1688, LDSM and MOVM, the simulator's beside a GPU's: python tests/device.py prepare|run|compare FOLDER

`prepare` writes PTX and inputs to the folder, `run` (where there is a GPU of compute capability 7.5 or later; needs torch and
numpy) what the GPU makes of them, `compare` runs the same source in the simulator and says where the two differ, and which rule of
summation the GPU's tensor cores follow.
"""

import ctypes
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
TILES = 2048  # warps, of a 16x8x8 product each

# ---------------------------------------------------------------- inputs
#: How the tiles of HMMA are filled, an equal share each.
FILLS = ["normal", "attention", "any exponent", "subnormal", "cancelling", "large accumulator", "small accumulator", "infinite and NaN"]


def halves(rng, fill, shape):
    normal = rng.standard_normal(shape).astype(np.float16)
    if fill == "attention":
        return np.exp2(-rng.exponential(4, shape)).astype(np.float16)
    if fill in ("any exponent", "large accumulator", "small accumulator", "cancelling"):
        bits = rng.integers(0, 0x7C00, shape) | rng.integers(0, 2, shape) << 15
        return bits.astype(np.uint16).view(np.float16)
    if fill == "subnormal":
        bits = rng.integers(0, 0x500, shape) | rng.integers(0, 2, shape) << 15
        return bits.astype(np.uint16).view(np.float16)
    if fill == "infinite and NaN":
        return np.where(rng.random(shape) < 0.02, rng.choice(np.array([np.inf, -np.inf, np.nan], np.float16), shape), normal)
    return normal


def hmma_inputs():
    """A [tile, 16, 8], B [tile, 8 (k), 8], and C [tile, 16, 8] as f32 and as f16."""
    rng = np.random.default_rng(75)
    a, b, c = [], [], []
    for fill in FILLS:
        n = TILES // len(FILLS)
        x, y = halves(rng, fill, (n, 16, 8)), halves(rng, "normal" if fill == "attention" else fill, (n, 8, 8))
        z = rng.standard_normal((n, 16, 8)).astype(np.float32)
        if fill in ("any exponent", "large accumulator", "small accumulator"):
            low, high = {"any exponent": (-50, 34), "large accumulator": (10, 60), "small accumulator": (-126, -20)}[fill]
            z = np.ldexp(z, rng.integers(low, high, z.shape)).astype(np.float32)
        if fill == "subnormal":
            z = np.ldexp(z, rng.integers(-149, -30, z.shape)).astype(np.float32)
        if fill == "cancelling":
            # what the products sum to, but for a last bit or a few
            with np.errstate(over="ignore"):
                exact = np.einsum("tmk,tkn->tmn", x.astype(np.float64), y.astype(np.float64))
                z = -exact.astype(np.float32) * (1 + np.ldexp(z, -18)).astype(np.float32)
        if fill == "infinite and NaN":
            z = np.where(rng.random(z.shape) < 0.02, rng.choice(np.array([np.inf, -np.inf, np.nan], np.float32), z.shape), z)
        a.append(x), b.append(y), c.append(z)
    with np.errstate(over="ignore"):
        c = np.concatenate(c)
        return np.concatenate(a), np.concatenate(b), c, c.astype(np.float16)


def fragments(t, rows):
    """Registers [tile, i, lane] of a [tile, rows, 8] matrix of halves: lane 4g+t has elements 2t and 2t+1 of rows g, g+8."""
    t = np.ascontiguousarray(t).reshape(len(t), rows // 8, 8, 4, 2)
    return t.view(np.uint32).reshape(len(t), rows // 8, 32)


def unfragments(r):
    return np.ascontiguousarray(r).view(np.float16).reshape(len(r), -1, 8)


def fragments_f32(t):
    """C [tile, 16, 8] as four registers: c0, c1 of row g, c2, c3 of row g+8."""
    return np.ascontiguousarray(t.reshape(len(t), 2, 8, 4, 2).transpose(0, 1, 4, 2, 3)).view(np.uint32).reshape(len(t), 4, 32)


def unfragments_f32(r):
    return np.ascontiguousarray(r.view(np.float32).reshape(len(r), 2, 2, 8, 4).transpose(0, 1, 3, 4, 2)).reshape(len(r), 16, 8)


LDSM = ["ldsm_1", "ldsm_1t", "ldsm_2", "ldsm_2t", "ldsm_4", "ldsm_4t"]


def launches():
    """(kernel, input arrays, output array) of each launch; a warp a block."""
    a, b, c, c16 = hmma_inputs()
    left, right = fragments(a, 16), fragments(b.transpose(0, 2, 1), 8)
    rng = np.random.default_rng(76)
    n = 256
    memory = rng.integers(0, 1 << 32, (n, 512), dtype=np.uint32)
    # any rows of 16 bytes, the same one for several lanes too
    rows = rng.integers(0, 128, (n, 32)).astype(np.uint32) * 16
    registers = rng.integers(0, 1 << 32, (n, 32), dtype=np.uint32)
    found = [
        ("hmma_f32", [left, right, fragments_f32(c)], np.zeros((TILES, 4, 32), np.uint32)),
        ("hmma_f16", [left, right, fragments(c16, 16)], np.zeros((TILES, 2, 32), np.uint32)),
        ("movm", [registers], np.zeros((n, 32), np.uint32)),
        ("special", [rng.integers(0, 1 << 32, (2048, 32), dtype=np.uint32)], np.zeros((2048, 32, 3), np.uint32)),
    ]
    return found + [(name, [memory, rows], np.zeros((n, 4, 32), np.uint32)) for name in LDSM]


# ---------------------------------------------------------------- on the GPU
def run(folder):
    import torch

    torch.zeros(1, device="cuda")  # makes the primary context current
    cuda = ctypes.CDLL("libcuda.so.1")

    def check(code):
        if code:
            raise RuntimeError(f"CUDA driver: error {code}")

    module = ctypes.c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(module), (folder / "turing.ptx").read_bytes() + b"\0"))
    data = np.load(folder / "inputs.npz")
    found = {}
    for name in data["kernels"]:
        function = ctypes.c_void_p()
        check(cuda.cuModuleGetFunction(ctypes.byref(function), module, str(name).encode()))
        inputs = [torch.from_numpy(data[f"{name}.{i}"].view(np.int32)).cuda() for i in range(int(data[f"{name}.inputs"]))]
        out = torch.zeros(tuple(data[f"{name}.shape"]), dtype=torch.int32, device="cuda")
        addresses = [t.data_ptr() for t in inputs]
        words = (ctypes.c_void_p * 4)(*addresses, *[None] * (3 - len(addresses)), out.data_ptr())
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(words))
        check(cuda.cuLaunchKernel(function, len(out), 1, 1, 32, 1, 1, 0, None, parameters, None))
        torch.cuda.synchronize()
        found[str(name)] = out.cpu().numpy().view(np.uint32)
    np.savez_compressed(folder / "outputs.npz", device=torch.cuda.get_device_name(), **found)
    print("ran", ", ".join(found), "on", torch.cuda.get_device_name())


def prepare(folder):
    import volta_sim as vs

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "turing.ptx").write_bytes(vs.compile(HERE / "fixtures/turing.cu", arch="compute_75"))
    data = {"kernels": np.array([name for name, *_ in launches()])}
    for name, inputs, out in launches():
        data |= {f"{name}.{i}": x for i, x in enumerate(inputs)} | {f"{name}.inputs": len(inputs), f"{name}.shape": out.shape}
    np.savez_compressed(folder / "inputs.npz", **data)


# ---------------------------------------------------------------- the comparison
def simulate():
    import volta_sim as vs

    cubin = vs.compile(HERE / "fixtures/turing.cu", arch="sm_75")
    for name, inputs, out in launches():
        words = {8 * i: x for i, x in enumerate(inputs)} | {24: out}
        yield name, vs.run(cubin, name, (len(out),), (32,), args=[vs.Struct(bytes(32), words)], mode="functional")[0][id(out)]


def truncating(a, b, c, group, extra):
    """HMMA with f32 accumulators by a rule: `group` products at a time and the sum so far are brought to the exponent of the largest of
    them, cut off `extra` bits below the 24 of an f32, and added; the sum is cut to an f32."""
    p = np.einsum("tmk,tkn->tmnk", a.astype(np.float64), b.astype(np.float64))
    total = c.astype(np.float64)
    for k in range(0, 8, group):
        terms = np.concatenate([p[..., k : k + group], total[..., None]], -1)
        # of a product, the exponent before its mantissas' product is normalised: see exponent_of
        largest = np.concatenate([exponents(a, b)[..., k : k + group], exponent(total)[..., None]], -1).max(-1)
        unit = np.ldexp(1.0, np.maximum(largest, -126) - 23 - extra)[..., None]
        total = cut((np.trunc(terms / unit) * unit).sum(-1))
    return total.astype(np.float32)


def exponent(x):
    """Of a float; of 0 that of nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((x == 0) | ~np.isfinite(x), -10000, np.frexp(x)[1] - 1)


def exponents(a, b):
    """Of the products, as the sum of their factors' exponents (a subnormal half counts as 2^-14)."""
    e = lambda x: np.where(x == 0, -10000, np.maximum(np.frexp(x.astype(np.float64))[1] - 1, -14))
    return e(a)[:, :, None, :] + e(b).transpose(0, 2, 1)[:, None, :, :]


def cut(x):
    """Towards zero to 24 bits, subnormals to a multiple of 2^-149."""
    unit = np.ldexp(1.0, np.maximum(np.maximum(exponent(x), -126) - 23, -149))
    return np.trunc(x / unit) * unit


def parts():
    """The fills, and which tiles are theirs."""
    n = TILES // len(FILLS)
    return [(fill, slice(i * n, (i + 1) * n)) for i, fill in enumerate(FILLS)]


def ordered(x):
    """Floating-point numbers as integers in the same order, 1 apart from their neighbours."""
    bits = x.view({2: np.int16, 4: np.int32}[x.itemsize]).astype(np.int64)
    return np.where(bits < 0, -(bits & ((1 << (8 * x.itemsize - 1)) - 1)), bits)


def same(a, b):
    return (a == b) | (np.isnan(a) & np.isnan(b))


def compare(folder):
    gpu = np.load(folder / "outputs.npz")
    print(f"simulator beside {gpu['device']}")
    sim = dict(simulate())
    for name in ["movm", *LDSM]:
        print(f"  {name:8s} {'equal to the bit' if np.array_equal(sim[name], gpu[name]) else 'DIFFERENT'} ({sim[name].size} registers)")
    a, b, c, c16 = hmma_inputs()
    for name, decode in (("hmma_f32", unfragments_f32), ("hmma_f16", unfragments)):
        x, y = decode(sim[name]), decode(gpu[name])
        print(f"  {name}: of the results equal to the bit, and the largest difference where not, in units in the last place")
        for fill, part in parts():
            equal = same(x[part], y[part])
            far = np.abs(ordered(x[part]) - ordered(y[part]))[~equal]
            print(f"    {fill:18s} {equal.mean():8.3%} {far.max() if far.size else 0}")
    y = unfragments_f32(gpu["hmma_f32"])
    finite = np.isfinite(y) & np.isfinite(c) & np.isfinite(a).all((1, 2))[:, None, None] & np.isfinite(b).all((1, 2))[:, None, None]
    print("  rules of summation for hmma_f32 (products at a time, bits kept beyond 24): results equal to the bit")
    for group in (4, 8):
        for extra in range(4):
            r = truncating(a, b, c, group, extra)
            shares = [same(r, y)[part][finite[part]].mean() for _, part in parts()]
            print(f"    {group}, {extra}:", " ".join(f"{s:8.3%}" for s in shares))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    {"prepare": prepare, "run": run, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
