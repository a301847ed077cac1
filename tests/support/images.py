"""Looks at a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def pixels(path: Path) -> np.ndarray:
    """The red, green and blue of every pixel, from 0 to 255."""
    from matplotlib.image import imread

    return np.round(imread(path)[:, :, :3] * 255).astype(int)


def is_hue(image: np.ndarray, hue: str) -> np.ndarray:
    """Which pixels have exactly this colour, written as #rrggbb."""
    rgb = [int(hue[i : i + 2], 16) for i in (1, 3, 5)]
    same: np.ndarray = (image == rgb).all(axis=2)
    return same


def share_of(image: np.ndarray, hue: str) -> float:
    """The share of the image that has this colour."""
    return float(is_hue(image, hue).mean())
