"""Checks the kernels of `volta_fa::fwd_fast` against their model, which is the CPU backend of that operator. The operator quantizes q and k
to int8, and its model has the same error against exact attention. Kernels differ from the model only by the rounding of probabilities, and
where a value halfway between two int8 codes rounds to the other code. `correctness` calls this module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .kernels import Target, environment  # the device; sets environment variables for a block
from .problems import Error  # of a result: its kind, the error, and the allowed error
from .tolerance import max_error  # the largest absolute difference; infinity where one side alone is NaN

#: Kernels of these passes get the problems here: attention, and `prepare_fast`, which quantizes k and v beforehand.
PASSES = ("FastForward", "FastPrepare")
#: Maximum of sum |out - model's| / sum |model's|; bf16 rounds out more coarsely.
OUT_LIMITS = {torch.float16: 2e-3, torch.bfloat16: 6e-3}
#: Maximum difference of softmax_lse, absolute.
LSE_LIMIT = 1e-3


@dataclass(frozen=True)
class FastCase:
    """A problem of `fwd_fast`. packed: cu_seqlens; masked: a random attn_mask; rotate: Hadamard transform before quantizing."""

    seqlen_q: int
    seqlen_k: int
    headdim: int
    dtype: torch.dtype = torch.float16
    packed: bool = False
    masked: bool = False
    is_causal: bool = False
    rotate: bool = False

    def __str__(self) -> str:
        flags = [name for name in ("packed", "masked", "is_causal", "rotate") if getattr(self, name)]
        dtype = str(self.dtype).removeprefix("torch.")
        return f"int8 scores, {self.seqlen_q} x {self.seqlen_k}, headdim {self.headdim}, {' '.join([dtype, *flags])}"


def problems(variant: dict[str, Any]) -> list[FastCase]:
    """Returns problems that together use packed sequences, masks, causal masks and rotation; `--quick` runs the first. `variant`: a
    kernel's entry in `info()["variants"]`, whose headdim is the largest that it takes."""
    d = variant["headdim"]
    if "generic" in variant["name"]:  # these alone have code for packed sequences and masks
        return [FastCase(141, 290, d, packed=True, is_causal=True), FastCase(77, 131, d - 8, torch.bfloat16, masked=True)]
    return [FastCase(141, 290, d), FastCase(77, 131, d - 8, torch.bfloat16, is_causal=True), FastCase(33, 200, d, rotate=True)]


@dataclass(frozen=True)
class FastInputs:
    """Tensors of a problem, on the CPU, and options."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    scratch_bytes: int = 0  # `correctness.poison` fills free memory with NaN before a call; this: bytes besides the tensors'

    @classmethod
    def draw(cls, p: FastCase, seed: int) -> FastInputs:
        """Draws random tensors of 4 query heads and 2 KV heads."""
        generator = torch.Generator().manual_seed(seed)
        lead = () if p.packed else (2,)
        shapes = ((*lead, p.seqlen_q, 4, p.headdim), (*lead, p.seqlen_k, 2, p.headdim), (*lead, p.seqlen_k, 2, p.headdim))
        q, k, v = (torch.randn(shape, generator=generator).to(p.dtype) for shape in shapes)
        options: dict[str, Any] = {"is_causal": p.is_causal, "rotate": p.rotate}
        if p.packed:
            for name, rows in (("q", p.seqlen_q), ("k", p.seqlen_k)):  # three sequences, the second empty
                options[f"cu_seqlens_{name}"] = torch.tensor([0, rows // 2, rows // 2, rows], dtype=torch.int32)
                options[f"max_seqlen_{name}"] = rows - rows // 2
        if p.masked:
            options["attn_mask"] = torch.rand(2, 1, p.seqlen_q, p.seqlen_k, generator=generator) > 0.2
        return cls(q, k, v, options)

    @property
    def given(self) -> list[Tensor]:
        """q, k and v."""
        return [self.q, self.k, self.v]

    def on(self, device: torch.device) -> tuple[list[Tensor], dict[str, Any]]:
        """Returns tensors and options on a device."""
        options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in self.options.items()}
        return [t.to(device) for t in self.given], options

    def model(self, prepared: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns out and softmax_lse of the CPU backend, for keys and values from a `prepare` if given."""
        with environment(VOLTA_FA_SIMULATE=None):  # CPU tensors run on the CPU backend
            return torch.ops.volta_fa.fwd_fast(self.q, self.k, self.v, prepared=prepared, **self.options)

    def prepare(self, target: Target) -> Tensor:
        """Returns k and v quantized by the prepare kernel, uint8."""
        (_, k, v), options = self.on(target.device)
        names = {"cu_seqlens_k", "max_seqlen_k", "rotate"} & options.keys()
        return torch.ops.volta_fa.prepare_fast(k, v, **{name: options[name] for name in names})

    def forward(self, target: Target) -> tuple[Tensor, Tensor]:
        """Returns out and softmax_lse of the kernels."""
        tensors, options = self.on(target.device)
        return torch.ops.volta_fa.fwd_fast(*tensors, **options)

    def exact(self, target: Target) -> Tensor:
        """Returns out of `fwd`, whose exact kernels also run for `fwd_fast` where no fast kernel applies."""
        tensors, options = self.on(target.device)
        bias, _ = options.pop("attn_mask", None), options.pop("rotate")
        return torch.ops.volta_fa.fwd(*tensors, attn_bias=bias, **options)[0]


def errors(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype) -> Iterator[Error]:
    """Yields the errors of `found` (out, softmax_lse) from the model's `expected`. NaN counts as an infinite error."""
    out, model = found[0].cpu().double(), expected[0].double()
    error = ((out - model).abs().sum() / model.abs().sum()).nan_to_num(nan=torch.inf).item()
    yield Error("out", "relative L1", error, OUT_LIMITS[dtype])
    yield Error("softmax_lse", "largest", max_error(found[1].cpu(), expected[1]), LSE_LIMIT)
