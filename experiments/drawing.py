"""Shared by the figures of the document: axes, panel titles, legends."""

from __future__ import annotations

from typing import Any

from rekindle.report.figures import GRID, INK


def finish(axes: Any, x_label: str, y_label: str, *, grid: str = "y") -> None:
    """Label the axes, draw the grid, and hide the upper and right spines."""
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    if grid:
        axes.grid(axis=grid, color=GRID, lw=0.8, zorder=1)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def head(axes: Any, text: str) -> None:
    """Set the title of a panel."""
    axes.set_title(text, loc="left", fontsize=11, color=INK)


def name_below(figure: Any, *panels: Any, columns: int = 7) -> None:
    """Draw one legend for all panels, below the figure."""
    unique: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True)) | unique
    style = {"loc": "outside lower center", "frameon": False, "fontsize": 9}
    figure.legend(
        list(unique.values()), list(unique), ncols=min(columns, len(unique) or 1), **style
    )
