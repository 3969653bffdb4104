"""The matrices that an optimizer step is timed on: those of DiT blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowdit.models.presets import PRESETS

__all__ = ["SIZES", "Matrix", "dit_matrices", "size_named", "weights_and_grads"]


@dataclass(frozen=True)
class Matrix:
    """A weight of a DiT block, (out features, in features), and how many matrices are fused along its rows."""

    name: str
    num_rows: int
    num_cols: int
    chunks: int = 1


@dataclass(frozen=True)
class Size:
    """A DiT's width, and by what it is divided here so that a step doesn't take minutes on a CPU."""

    hidden: int
    scaled_by: int = 1


# The published DiT shapes at full width, the big presets at a quarter of theirs.
SIZES: dict[str, Size] = {
    **{name: Size(PRESETS[f"{name}/2"].hidden_size) for name in ("S", "B", "L", "XL")},
    **{name: Size(PRESETS[name].hidden_size // 4, 4) for name in ("1.3B", "2B", "4B", "9B", "15B")},
}


def size_named(name: str) -> Size:
    """A key of `SIZES`, or a width as a number.

    Raises:
        ValueError: neither; the message lists the names.

    Example:
        >>> size_named("B").hidden, size_named("15B").hidden, size_named("96").hidden
        (768, 1280, 96)
    """
    if name in SIZES:
        return SIZES[name]
    if name.isdecimal() and int(name) > 0:
        return Size(int(name))
    raise ValueError(f"size {name!r} is unknown: take one of {', '.join(SIZES)}, or a width such as 512")


def dit_matrices(hidden: int, depth: int, *, chunked: bool = False, adaln: bool = True) -> list[Matrix]:
    """The Muon matrices of ``depth`` DiT blocks of width ``hidden`` (MLP ratio 4): 18 hidden^2 parameters a block.

    ``adaln=False`` leaves out the modulation (12 hidden^2 stay), as where AdamW takes it.
    """
    block = [
        Matrix("adaLN", 6 * hidden, hidden, 6 if chunked else 1),
        Matrix("qkv", 3 * hidden, hidden, 3 if chunked else 1),
        Matrix("out", hidden, hidden),
        Matrix("fc1", 4 * hidden, hidden),
        Matrix("fc2", hidden, 4 * hidden),
    ]
    block = block if adaln else block[1:]
    return [Matrix(f"blocks.{i}.{m.name}", m.num_rows, m.num_cols, m.chunks) for i in range(depth) for m in block]


def weights_and_grads(matrices: Sequence[Matrix], *, split: bool) -> list[tuple[Tensor, Tensor]]:
    """Weights and gradients in fp32, (m, n) each, the same on every call and rank; `split`: each chunk by itself."""
    generator = torch.Generator().manual_seed(0)
    pairs: list[tuple[Tensor, Tensor]] = []
    for matrix in matrices:
        weight, grad = torch.randn(2, matrix.num_rows, matrix.num_cols, generator=generator)
        num_parts = matrix.chunks if split else 1
        pairs += zip((weight * 0.02).chunk(num_parts), grad.chunk(num_parts), strict=True)
    return pairs
