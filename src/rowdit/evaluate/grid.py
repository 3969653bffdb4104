"""Many small images as one picture."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from rowdit.evaluate.fingerprint import write_whole


def write_grid(path: Path, images: Tensor, columns: int) -> None:
    """Write images as one PNG, row by row, `columns` in a row, without gaps; missing ones are black.

    Args:
        path: the file; its folder is made.
        images: (N, C, H, W) uint8, C = 1 or 3.
        columns: at least 1.
    """
    num, channels, height, width = images.shape
    rows = -(-num // columns)
    cells = torch.zeros(rows * columns, channels, height, width, dtype=torch.uint8)
    cells[:num] = images
    page = cells.view(rows, columns, channels, height, width).permute(0, 3, 1, 4, 2)
    pixels = page.reshape(rows * height, columns * width, channels).numpy()
    buffer = BytesIO()
    Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(buffer, format="PNG", optimize=True)
    write_whole(path, buffer.getvalue())
