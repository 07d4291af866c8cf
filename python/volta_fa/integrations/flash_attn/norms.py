"""flash-attn 2.8's norms in plain PyTorch: `flash_attn.ops.triton.layer_norm` and `flash_attn.ops.rms_norm`. The shim has them
(`install_flash_attn_shim()`), for programs that import them from flash-attn. They compute in fp32, as flash-attn's Triton kernels do, and
differentiate with PyTorch's autograd. Dropout draws other random numbers than flash-attn's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...errors import bad_argument, require_tensors

__all__ = [
    "DropoutAddRMSNorm", "RMSNorm", "dropout_add_rms_norm", "layer_norm_fn", "layer_norm_linear_fn", "layer_norm_ref",
    "rms_norm", "rms_norm_fn", "rms_norm_ref",
]  # fmt: skip


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """Computes layer norm, or RMS norm, of dropout(x * rowscale) + dropout(x1) + residual.

    Args:
        x: (..., hidden_size). x1 and residual have its shape, rowscale has it without the hidden_size. x1 excludes rowscale.
        weight, bias: (hidden_size). weight1 and bias1 give a second result of the same sum.
        dropout_p: probability of dropping an element of x, and of x1; the others are divided by 1 - dropout_p.
        prenorm: also return the sum, in residual's dtype; without residual in float32 if residual_in_fp32, else in x's dtype.
        zero_centered_weight: the weights are 1 + weight and 1 + weight1.
        return_dropout_mask: also return the bool masks of x and x1; None without dropout, or without x1.
        out_dtype: x's dtype unless given.
        out, residual_out: where to write the first result and the sum.

    Returns the norm, or a tuple: the norm, with weight1 the second, with prenorm the sum, with return_dropout_mask two masks.

    Raises ValueError for wrong arguments.
    """
    require_tensors(x=x, weight=weight)
    if not x.is_floating_point():
        raise bad_argument("x", f"dtype {x.dtype}", "a floating-point dtype: convert x first")
    of_shape = {
        (x.shape, "that of x"): {"residual": residual, "x1": x1, "out": out, "residual_out": residual_out},
        (x.shape[:-1], "that of x without its last dimension"): {"rowscale": rowscale},
        (x.shape[-1:], "the last dimension of x"): {"weight": weight, "bias": bias, "weight1": weight1, "bias1": bias1},
    }
    for (shape, whose), tensors in of_shape.items():
        for name, t in tensors.items():
            if t is not None and t.shape != shape:  # others would broadcast
                raise bad_argument(name, f"shape {tuple(t.shape)}", f"shape {tuple(shape)}, {whose}")
    if rowscale is not None and x1 is not None:
        raise bad_argument("rowscale", "a tensor", "None with x1")
    wide = torch.promote_types(x.dtype, torch.float32)
    total, mask = _dropout(x.to(wide) if rowscale is None else x.to(wide) * rowscale[..., None].to(wide), dropout_p)
    mask1 = None
    if x1 is not None:
        dropped, mask1 = _dropout(x1.to(wide), dropout_p)
        total = total + dropped
    if residual is not None:
        total = total + residual.to(wide)
    centered = total if is_rms_norm else total - total.mean(-1, keepdim=True)
    normed = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)

    def scaled(weight: Tensor, bias: Tensor | None) -> Tensor:
        result = normed * (weight.to(wide) + 1.0 if zero_centered_weight else weight.to(wide))
        return (result if bias is None else result + bias.to(wide)).to(out_dtype or x.dtype)

    first = scaled(weight, bias)
    results: list[Tensor | None] = [first if out is None else out.copy_(first)]
    if weight1 is not None:
        results.append(scaled(weight1, bias1))
    if prenorm:
        dtype = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
        results.append(total.to(dtype) if residual_out is None else residual_out.copy_(total))
    if return_dropout_mask:
        results += [mask, mask1]
    return results[0] if len(results) == 1 else tuple(results)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """Computes `layer_norm_fn` with RMS norm: no mean is subtracted."""
    return layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32, zero_centered_weight,
        is_rms_norm=True, return_dropout_mask=return_dropout_mask, out_dtype=out_dtype, out=out, residual_out=residual_out,
    )  # fmt: skip


def layer_norm_linear_fn(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    """Computes a linear layer of `layer_norm_fn`, in x's dtype or that of autocast.

    Args:
        linear_weight: (out_features, hidden_size). linear_bias: (out_features).

    Returns the layer's result, and with prenorm also the sum of x and residual.
    """
    y, total = layer_norm_fn(
        x, norm_weight, norm_bias, residual, eps=eps, prenorm=True, residual_in_fp32=residual_in_fp32, is_rms_norm=is_rms_norm
    )
    out = functional.linear(y, linear_weight.to(y.dtype), None if linear_bias is None else linear_bias.to(y.dtype))
    return (out, total) if prenorm else out


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
    *,
    is_rms_norm: bool = False,
) -> Any:
    """Computes `layer_norm_fn` in the dtypes of its arguments, for comparisons.

    Args:
        dropout_mask, dropout_mask1: bool, what dropout keeps of x and of x1; random unless given.
        upcast: compute in float32.

    Returns what `layer_norm_fn` returns, without masks.
    """
    dtype = x.dtype
    if upcast:
        x, weight = x.float(), weight.float()
        bias, residual, x1, weight1, bias1 = (t if t is None else t.float() for t in (bias, residual, x1, weight1, bias1))
    total = _dropped(x if rowscale is None else x * rowscale[..., None], dropout_p, dropout_mask)
    if x1 is not None:
        total = total + _dropped(x1, dropout_p, dropout_mask1)
    if residual is not None:
        total = (total + residual).to(total.dtype)
    results = []
    for scale, shift in ((weight, bias), (weight1, bias1)):
        if scale is None:
            continue
        scale = scale + 1.0 if zero_centered_weight else scale
        if is_rms_norm:
            normed = total / total.square().mean(-1, keepdim=True).add(eps).sqrt() * scale
            results.append((normed if shift is None else normed + shift).to(dtype))
        else:
            results.append(functional.layer_norm(total.to(scale.dtype), total.shape[-1:], scale, shift, eps).to(dtype))
    if prenorm:
        results.append(total)
    return results[0] if len(results) == 1 else tuple(results)


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
) -> Any:
    """Computes `layer_norm_ref` with RMS norm: no mean is subtracted."""
    return layer_norm_ref(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, zero_centered_weight, dropout_mask,
        dropout_mask1, upcast, is_rms_norm=True,
    )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Returns the RMS norm of x, (..., hidden_size), in x's dtype."""
    return rms_norm_fn(x, weight, None, eps=epsilon)


def dropout_add_rms_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Computes the RMS norm of dropout(x0 * rowscale * layerscale) + residual.

    Args:
        layerscale: (hidden_size).

    The other arguments are `rms_norm_fn`'s. Returns what that returns, with one mask, which is all True without dropout.
    """
    if layerscale is not None:
        x0 = x0 * layerscale
    found = rms_norm_fn(
        x0, weight, bias, residual, eps=epsilon, dropout_p=dropout_p, rowscale=rowscale, prenorm=prenorm,
        residual_in_fp32=residual_in_fp32, return_dropout_mask=return_dropout_mask,
    )  # fmt: skip
    if not return_dropout_mask:
        return found
    *results, mask, _ = found
    return *results, torch.ones_like(x0, dtype=torch.bool) if mask is None else mask


class RMSNorm(torch.nn.Module):
    """Computes `rms_norm_fn` with a weight. `flash_attn.ops.rms_norm.RMSNorm` has the first two arguments, device and dtype."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.drop = torch.nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.zero_centered_weight = zero_centered_weight
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets the weights to a scale of 1."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False) -> Any:
        """Returns the norm of dropout(x) + residual, and with prenorm also that sum."""
        return rms_norm_fn(
            x, self.weight, None, residual, eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0, prenorm=prenorm,
            residual_in_fp32=residual_in_fp32, zero_centered_weight=self.zero_centered_weight,
        )  # fmt: skip


class DropoutAddRMSNorm(torch.nn.Module):
    """Computes `dropout_add_rms_norm` with a weight."""

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.prenorm = prenorm
        self.p = p
        self.eps = eps
        self.residual_in_fp32 = residual_in_fp32
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Resets the weights to a scale of 1."""
        torch.nn.init.ones_(self.weight)

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Any:
        """Returns the norm of dropout(x0) + residual, and with prenorm also that sum."""
        p = self.p if self.training else 0.0
        return dropout_add_rms_norm(
            x0, residual, self.weight, None, p, self.eps, prenorm=self.prenorm, residual_in_fp32=self.residual_in_fp32
        )


def _dropped(x: Tensor, p: float, keep: Tensor | None) -> Tensor:
    """Returns x after dropout by a given mask, or by a random one."""
    if not p > 0.0:
        return x
    return functional.dropout(x, p) if keep is None else x.masked_fill(~keep, 0.0) / (1.0 - p)


def _dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """Returns x after dropout, and the mask of what is kept."""
    if not p > 0.0:
        return x, None
    keep = functional.dropout(torch.ones_like(x), p) > 0
    return x.masked_fill(~keep, 0.0) / max(1.0 - p, torch.finfo(x.dtype).tiny), keep  # p = 1: zeros with gradient 0, not 0 / 0
