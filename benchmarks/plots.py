"""Defines what all plots share: no display, one palette, one resolution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed
from matplotlib import pyplot

from .report import console

#: Of each headdim.
HEADDIM_COLORS = {32: "#7f7f7f", 64: "#c0392b", 96: "#e67e22", 128: "#2c6fbb", 192: "#8e44ad", 256: "#27824a"}
#: Of each implementation.
COLORS = {"volta_fa": "#c0392b", "eager": "#333333", "eager fp32": "#999999", "SDPA efficient": "#2c6fbb", "SDPA flash": "#27824a"}
MARKERS = {"volta_fa": "o", "eager": "s", "eager fp32": "D", "SDPA efficient": "^", "SDPA flash": "v"}


def panels(rows: int, columns: int, title: str, size: tuple[float, float], **options: Any):
    """A figure and its axes as a (rows, columns) array."""
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)
    figure.suptitle(title, fontsize=11)
    for axis in axes.flat:
        axis.grid(True, color="#dddddd", linewidth=0.6)
    return figure, axes


def shared_legend(figure, axes) -> None:
    """Below all panels, each label once."""
    unique = {}
    for axis in axes.flat:
        for handle, text in zip(*axis.get_legend_handles_labels()):
            unique.setdefault(text, handle)
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=6, fontsize=8)


def label(text: str, size: int = 60) -> str:
    return text if len(text) <= size else text[: size - 1] + "…"


def save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, format="png")
    pyplot.close(figure)
    console.print(f"wrote {path}", soft_wrap=True)
