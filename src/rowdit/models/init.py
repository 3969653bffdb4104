"""What a DiT's parameters and positions are at the start, as in the published model (arXiv:2212.09748).

Each row of each parameter is a function of the seed, the parameter's name and the row's number. So it depends neither
on the device nor on torch's generators, nor on who else draws: a rank that holds a shard makes that shard alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rowdit import streams


def initial_value(name: str, shape: Sequence[int], seed: int, rows: Sequence[int] | None = None) -> Tensor:
    """Initial value of the parameter ``name``: adaLN, final layer and biases zero; scales of norms one; time, class and
    caption embeddings normal, deviation 0.02; all other matrices Xavier-uniform over the flattened (out, in).

    Args:
        name: the parameter's name in :class:`DiT`.
        shape: its whole shape.
        seed: any integer.
        rows: which rows (dim 0) to draw; all by default. A rank that holds some rows draws those alone.

    Returns:
        (len(rows), *shape[1:]) float32 on the CPU. Row i depends on (seed, name, i) and the shape alone.
    """
    rows = range(shape[0]) if rows is None else rows
    if name.endswith("bias") or "adaLN_modulation" in name or name.startswith("final_layer"):
        return torch.zeros(len(rows), *shape[1:], device="cpu")
    if name.endswith("_norm.weight"):
        return torch.ones(len(rows), *shape[1:], device="cpu")
    if name.startswith(("t_embedder", "y_embedder")):
        return streams.normal(seed, f"init/{name}", rows, shape[1:]).mul_(0.02)
    bound = math.sqrt(6 / (shape[0] + math.prod(shape[1:])))
    return streams.uniform(seed, f"init/{name}", rows, shape[1:]).mul_(2).sub_(1).mul_(bound)


@torch.no_grad()
def write_initial_value_(parameter: Tensor, name: str, seed: int) -> None:
    """Writes the initial value of the parameter ``name`` in place; of a sharded one only the rows that are here.

    Args:
        parameter: a plain tensor, or a DTensor whose dim 0 may be split over one axis of its mesh, as FSDP2 splits it.
        name: its name in :class:`DiT`.
        seed: any integer.

    Raises:
        ValueError: a DTensor that is split in another way.
    """
    placements = getattr(parameter, "placements", None)
    if placements is None:
        parameter.copy_(initial_value(name, parameter.shape, seed))
        return
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    if len(axes) > 1 or not all(placements[axis].is_shard(0) for axis in axes):
        raise ValueError(f"{name} is placed {placements}: initial values are drawn by rows; split it over dim 0 alone")
    num_rows, mesh, local = parameter.shape[0], parameter.device_mesh, parameter.to_local()  # type: ignore[attr-defined]
    first = 0
    if axes:  # as torch.chunk: all ranks but the last have ceil(rows / ranks), or none
        first = min(num_rows, -(-num_rows // mesh.size(axes[0])) * mesh.get_local_rank(axes[0]))
    local.copy_(initial_value(name, parameter.shape, seed, range(first, first + local.shape[0])))


def sincos_positions(hidden_size: int, side: int) -> Tensor:
    """Fixed positions of a side x side grid of tokens: a quarter of the width each for sin and cos of the column and of
    the row, at frequencies 10000^(-i / (D/4)).

    Returns:
        (1, side^2, D) float32, tokens row by row.
    """
    quarter = hidden_size // 4
    frequencies = 10_000.0 ** (-torch.arange(quarter, dtype=torch.float64, device="cpu") / quarter)
    angles = torch.arange(side, dtype=torch.float64, device="cpu")[:, None] * frequencies
    axis = torch.cat([angles.sin(), angles.cos()], dim=1)
    columns, rows = axis.repeat(side, 1), axis.repeat_interleave(side, dim=0)
    return torch.cat([columns, rows], dim=1).float()[None]
