"""flash-attn 2.8's cross entropy in plain PyTorch: the shim's `flash_attn.losses.cross_entropy` and `flash_attn.ops.triton.cross_entropy`.

Programs that import flash-attn expect it there; it needs no kernel of volta_fa, and runs on any device. It computes in fp32, some rows at a
time, so it needs no fp32 copy of all logits. With x = logit_scale * logits, lse = logsumexp(x), s = label_smoothing, and the mean over
classes c, a row has

    loss = lse - (1 - s) * x[label] - s * mean(x) + lse_square_scale * lse ** 2
    d loss / d x[c] = softmax(x)[c] * (1 + 2 * lse_square_scale * lse) - s / classes - (1 - s) * (c == label)"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import bad_argument

__all__ = ["CrossEntropyLoss", "cross_entropy_loss"]

#: Maximum number of logits in a chunk of rows, which is converted to fp32 at once: 64 MiB.
_CHUNK = 2**24


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Computes the cross entropy of each row. Differentiable in logits.

    Args:
        logits: (batch, vocab_size), of any floating dtype. With a process_group this rank's classes, in the order of ranks.
        labels: (batch,), integers. ignore_index gives loss 0, other values outside of the classes give NaN.
        precomputed_lse: float32, (batch,): the logsumexp of each row of logits. Unused with label_smoothing or a logit_scale.
        label_smoothing: part of the target probability that is spread evenly over all classes.
        logit_scale: multiplies the logits.
        lse_square_scale: adds lse_square_scale * logsumexp ** 2 to the loss, the z-loss.
        inplace_backward: write the gradient into logits.
        process_group: ranks that share the classes.

    Returns losses, (batch,), and their z-losses, without a gradient; float32, or float64 for float64 logits.

    Raises ValueError for wrong arguments.
    """
    if logits.dim() != 2:
        raise bad_argument("logits", f"shape {tuple(logits.shape)}", "(batch, vocab_size)")
    if not logits.is_floating_point():
        raise bad_argument("logits", f"dtype {logits.dtype}", "a floating-point dtype: convert logits first")
    if labels.dtype.is_floating_point or labels.dtype.is_complex:
        raise bad_argument("labels", f"dtype {labels.dtype}", "an integer dtype: labels are numbers of classes")
    if labels.shape != logits.shape[:1]:
        raise bad_argument("labels", f"shape {tuple(labels.shape)}", f"shape ({len(logits)},), one label for each row of logits")
    if not logit_scale > 0.0:
        raise bad_argument("logit_scale", logit_scale, "a positive number")
    if label_smoothing != 0.0 or logit_scale != 1.0:
        precomputed_lse = None
    if precomputed_lse is not None and precomputed_lse.shape != labels.shape:
        raise bad_argument("precomputed_lse", f"shape {tuple(precomputed_lse.shape)}", f"shape {tuple(labels.shape)}, that of labels")
    losses, z_losses = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels, precomputed_lse, label_smoothing, logit_scale, lse_square_scale, ignore_index, inplace_backward, process_group
    )
    return losses, z_losses


class CrossEntropyLoss(torch.nn.Module):
    """Computes `cross_entropy_loss` and reduces it.

    Args:
        reduction: `mean` (over the labels that are not ignore_index), `sum` or `none`.
        return_z_loss: also return the z-loss.

    The other arguments are `cross_entropy_loss`'s. Raises NotImplementedError for another reduction.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise bad_argument("reduction", repr(reduction), "'mean', 'sum' or 'none'", error=NotImplementedError)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = return_z_loss

    def forward(self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the loss, (batch,) or a scalar; with return_z_loss also its part that is the z-loss.
        `input`: (batch, vocab_size), `target`: (batch,)."""
        losses = cross_entropy_loss(
            input, target, precomputed_lse, self.label_smoothing, self.logit_scale, self.lse_square_scale, self.ignore_index,
            self.inplace_backward, self.process_group,
        )  # fmt: skip
        loss, z_loss = (self._reduced(part, target) for part in losses)
        return (loss, z_loss) if self.return_z_loss else loss

    def _reduced(self, losses: Tensor, target: Tensor) -> Tensor:
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / (target != self.ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of rows: losses and z-losses. The backward pass computes probabilities from the logits again, to save their memory.
    With a process_group each rank has logits of some classes: `first_class`, `first_class` + 1, ..."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, precomputed_lse: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
        smoothing, logit_scale, lse_square_scale, ignore_index, inplace_backward, process_group = options
        ranks = 1 if process_group is None else dist.get_world_size(process_group)
        first_class = 0 if process_group is None else dist.get_rank(process_group) * logits.shape[1]
        classes = ranks * logits.shape[1]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        lse = logits.new_empty(len(logits), dtype=dtype) if precomputed_lse is None else precomputed_lse.to(dtype)
        losses = torch.empty_like(lse)  # this rank's terms of -(1 - s) * x[label] - s * mean(x); the others are added below
        is_here, column = _columns(labels, first_class, logits.shape[1])
        for rows in _chunks(logits):
            x = logits[rows].to(dtype) * logit_scale
            if precomputed_lse is None:
                lse[rows] = x.logsumexp(-1)
            of_label = x.gather(1, column[rows, None]).squeeze(1).masked_fill_(~is_here[rows], 0.0)
            losses[rows] = -(1 - smoothing) * of_label - (smoothing / classes * x.sum(-1) if smoothing else 0.0)
        if ranks > 1:
            parts = [torch.empty_like(lse) for _ in range(ranks)]
            dist.all_gather(parts, lse.contiguous(), group=process_group)
            dist.all_reduce(losses, group=process_group)
            lse = torch.stack(parts).logsumexp(0)
        ignored = labels == ignore_index
        # results are new tensors: of one that was written in place, torch.compile loses the gradient
        z_losses = (lse_square_scale * lse.square()).masked_fill(ignored, 0.0)
        losses = (losses + lse + z_losses).masked_fill((labels < 0) | (labels >= classes), torch.nan).masked_fill(ignored, 0.0)
        ctx.save_for_backward(logits, labels, lse)
        ctx.mark_non_differentiable(z_losses)
        ctx.options = smoothing, logit_scale, lse_square_scale, ignore_index, inplace_backward, first_class, classes
        return losses, z_losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, lse = ctx.saved_tensors
        smoothing, logit_scale, lse_square_scale, ignore_index, inplace_backward, first_class, classes = ctx.options
        factor = (grads[0].to(lse.dtype) * logit_scale).masked_fill(labels == ignore_index, 0.0)[:, None]
        dlogits = logits.detach() if inplace_backward else torch.empty_like(logits)
        is_here, column = _columns(labels, first_class, logits.shape[1])
        for rows in _chunks(logits):
            x = logits[rows].to(lse.dtype) * logit_scale
            gradient = x.sub_(lse[rows, None]).exp_().mul_(1 + 2 * lse_square_scale * lse[rows, None]).sub_(smoothing / classes)
            gradient.scatter_add_(1, column[rows, None], (smoothing - 1.0) * is_here[rows, None].to(gradient.dtype))
            dlogits[rows] = gradient.mul_(factor[rows]).to(dlogits.dtype)
        return dlogits, *(None,) * 8  # the other arguments of forward()


def _columns(labels: Tensor, first_class: int, count: int) -> tuple[Tensor, Tensor]:
    """Returns whether each label is among the `count` classes from `first_class` on, and its column, 0 if it is not."""
    column = labels.long() - first_class
    is_here = (column >= 0) & (column < count)
    return is_here, column.masked_fill(~is_here, 0)


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Returns slices of rows with at most _CHUNK logits each, or one row."""
    step = max(1, _CHUNK // max(1, logits.shape[1]))
    # torch.compile then makes the number of chunks constant, and not the number of rows
    return (slice(step * i, step * (i + 1)) for i in range(-(-len(logits) // step)))
