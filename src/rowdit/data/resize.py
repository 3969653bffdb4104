"""Resizing, by two stated rules.

To a size that divides the old one: the mean over each k x k square of pixels, rounded half up,
``(sum + k * k // 2) // (k * k)``. To any other size: Pillow's bicubic filter, which widens with the reduction (so it
averages and doesn't alias); reductions beyond twofold first take means over whole squares.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

REDUCING_GAP = 2.0  # Pillow: reduce by whole squares to no less than this many times the target, then filter


def resize_rule(old_size: int, new_size: int) -> str:
    """The name of what :func:`resize_square` does, for fingerprints: ``"native"``, ``"area"`` or ``"bicubic"``."""
    if old_size == new_size:
        return "native"
    return "area" if old_size % new_size == 0 else "bicubic"


def resize_square(images: np.ndarray, size: int) -> np.ndarray:
    """Square images to size x size.

    Args:
        images: (N, C, H, H) uint8.
        size: >= 1, the new H.

    Returns:
        (N, C, size, size) uint8; ``images`` itself when that is its size.

    Raises:
        ValueError: a size below 1.
    """
    if size < 1:
        raise ValueError(f"image_size {size} must be >= 1")
    old_size = images.shape[-1]
    rule = resize_rule(old_size, size)
    if rule == "native":
        return images
    if rule == "area":
        return area_mean(images, old_size // size)
    resized = np.empty((*images.shape[:2], size, size), np.uint8)
    for index in np.ndindex(*images.shape[:2]):
        plane = Image.fromarray(images[index])
        resized[index] = plane.resize((size, size), Image.Resampling.BICUBIC, reducing_gap=REDUCING_GAP)
    return resized


def area_mean(images: np.ndarray, factor: int) -> np.ndarray:
    """Means over factor x factor squares, rounded half up: (sum + factor^2 // 2) // factor^2.

    Args:
        images: (..., H, W) uint8, H and W multiples of ``factor``.
        factor: >= 1.

    Returns:
        (..., H / factor, W / factor) uint8.

    Example:
        >>> area_mean(np.array([[0, 1], [0, 1]], np.uint8), 2).tolist()
        [[1]]
    """
    height, width = images.shape[-2:]
    squares = images.reshape(*images.shape[:-2], height // factor, factor, width // factor, factor)
    total = squares.sum(axis=(-3, -1), dtype=np.uint32)
    return ((total + factor**2 // 2) // factor**2).astype(np.uint8)
