"""Measures the GPU's rate of fp32 atomic additions to global memory, by which the backward pass sums dq. `performance` reports it. PyTorch
has no operation that does only this. So this module has a PTX kernel, which every driver since CUDA 9 compiles for every GPU since Volta.
The driver launches it in PyTorch's context, on PyTorch's stream."""

from __future__ import annotations

import ctypes
from statistics import median
from typing import Any

import torch

_THREADS = 256
_BLOCKS_PER_SM = 8  # with _THREADS each, the 2048 threads that an SM of Volta holds
#: Iterations ("rounds") of a thread's loop in one launch, and additions in an iteration.
_ROUNDS = 64
_ADDS_PER_ROUND = 8
#: Launches: two warm up, and the median time of the others counts.
_LAUNCHES = 12
#: Floats in the target buffer: 1 MiB, which fits every GPU's L2 and covers all its slices.
_FLOATS = 2**18

# Every thread adds 1 to eight floats a round. A warp's 32 floats are four rows of eight, and rows are `row` floats apart. With `row` 8
# they are a line of 128 bytes, as in the backward kernels, which order dq's accumulator for this (dq_accumulator.cuh). With a larger
# `row` they are as in a row-major accumulator. A thread's successive addresses are `hop` bytes apart, from round to round too. Addresses
# wrap around at the end of the memory, whose size in bytes, mask + 1, is a power of two.
_ADD = """\
    and.b32 %r10, %r7, %r2;
    cvt.u64.u32 %d1, %r10;
    add.u64 %d1, %d0, %d1;
    red.global.add.f32 [%d1], %f0;
    add.u32 %r7, %r7, %r1;
"""
_PTX = """\
.version 6.0
.target sm_70
.address_size 64
.visible .entry volta_fa_atomic_adds(.param .u64 memory, .param .u32 row, .param .u32 hop, .param .u32 mask, .param .u32 rounds)
{
    .reg .b32 %r<16>;
    .reg .b64 %d<4>;
    .reg .f32 %f<2>;
    .reg .pred %p;
    ld.param.u64 %d0, [memory];
    cvta.to.global.u64 %d0, %d0;
    ld.param.u32 %r0, [row];
    ld.param.u32 %r1, [hop];
    ld.param.u32 %r2, [mask];
    ld.param.u32 %r3, [rounds];
    mov.u32 %r4, %tid.x;
    mov.u32 %r5, %ctaid.x;
    mov.u32 %r6, %ntid.x;
    // the warp's number; its first address is 128 bytes, 32 floats, after that of the warp before
    mad.lo.u32 %r7, %r5, %r6, %r4;
    shr.u32 %r7, %r7, 5;
    mul.lo.u32 %r7, %r7, 128;
    // the lane's address in the warp's: float lane % 8 of row lane / 8
    and.b32 %r8, %r4, 7;
    and.b32 %r9, %r4, 31;
    shr.u32 %r9, %r9, 3;
    mad.lo.u32 %r8, %r9, %r0, %r8;
    shl.b32 %r8, %r8, 2;
    add.u32 %r7, %r7, %r8;
    mov.f32 %f0, 0f3F800000;
again:
__ADDS__    sub.u32 %r3, %r3, 1;
    setp.ne.u32 %p, %r3, 0;
    @%p bra again;
    ret;
}
""".replace("__ADDS__", _ADD * _ADDS_PER_ROUND)


def rates(device: torch.device, sms: int) -> dict[str, float]:
    """Returns 10^9 additions per second, "lines": to whole lines of 128 bytes, as in the backward kernels, and "rows": to four rows of
    32 bytes, as with row-major order at headdim 128. Their ratio is what the order of dq's accumulator saves.

    `sms`: SMs of the device. Raises RuntimeError if the driver rejects the kernel or the sums are wrong."""
    return {"lines": _rate(device, sms, row=8), "rows": _rate(device, sms, row=128)}


def _rate(device: torch.device, sms: int, row: int) -> float:
    """Returns 10^9 additions per second. `row`: floats between rows of eight floats; with 8 the rows form lines."""
    with torch.cuda.device(device):
        memory = torch.zeros(_FLOATS, device=device)
        launch = _Kernel(_PTX, "volta_fa_atomic_adds")
        blocks = sms * _BLOCKS_PER_SM
        # an eighth of the memory and 4 KiB, so that consecutive additions of a warp are far apart and reach all of it
        hop = 4 * _FLOATS // _ADDS_PER_ROUND + 4 * 1024
        arguments = (ctypes.c_uint64(memory.data_ptr()), *(ctypes.c_uint32(n) for n in (row, hop, 4 * _FLOATS - 1, _ROUNDS)))
        adds = blocks * _THREADS * _ROUNDS * _ADDS_PER_ROUND
        times = []
        for run in range(_LAUNCHES):  # each adds to the sums of all before
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch(blocks, _THREADS, arguments)
            end.record()
            end.synchronize()
            if run >= 2:  # the first two warm up: compile, fill caches
                times.append(start.elapsed_time(end))
        if memory.double().sum().item() != _LAUNCHES * adds:
            raise RuntimeError("atomic adds were lost")
        return adds / median(times) / 1e6


class _Kernel:
    """A kernel from PTX text, launched through the driver. Its module stays loaded until the process ends."""

    def __init__(self, ptx: str, name: str):
        self._driver = ctypes.CDLL("libcuda.so.1")
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.current_stream().synchronize()  # PyTorch makes its context current
        self._check(self._driver.cuModuleLoadData(ctypes.byref(module), ptx.encode() + b"\0"))
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))

    def __call__(self, blocks: int, threads: int, arguments: tuple[Any, ...]) -> None:
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        grid, block, shared_bytes, extra = (blocks, 1, 1), (threads, 1, 1), 0, None
        self._check(self._driver.cuLaunchKernel(self._function, *grid, *block, shared_bytes, stream, pointers, extra))

    def _check(self, status: int) -> None:
        if status != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"the CUDA driver said: {(text.value or b'').decode() or status}")
