"""What the plan is told of each parameter: its layout, and what the arithmetic on it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rowmuon import update
from rowmuon.coefficients import Triple, resolve_coefficients
from rowmuon.device import compute_device
from rowmuon.groups import flops_per_matrix, name_of
from rowmuon.layout import Layout, local_tensor
from rowmuon.orthogonalize import newton_schulz_bytes
from rowmuon.plan import Entry
from rowmuon.routing import default_stack_dims

__all__ = ["KernelWorkspace", "make_entry"]


@dataclass(frozen=True)
class KernelWorkspace:
    """A `rowmuon.plan.Workspace`."""

    matrix_shape: tuple[int, int]
    coefficients: tuple[Triple, ...]
    dtype: torch.dtype
    weight_dtype: torch.dtype
    momentum_dtype: torch.dtype
    device: str
    maximize: bool

    def momentum(self, num_rows: int, num_cols: int) -> int:
        dtypes = (self.momentum_dtype, self.weight_dtype)
        return update.momentum_bytes(num_rows, num_cols, dtypes, self.device, self.maximize)

    def part(self, num_rows: int, num_cols: int, sent: torch.dtype, received: torch.dtype) -> int:
        dtypes = (self.weight_dtype, self.momentum_dtype, sent, received)
        return update.part_bytes(num_rows, num_cols, dtypes, self.device, self.maximize)

    def rows(self, num_rows: int, num_cols: int) -> tuple[int, int]:
        dtypes = (self.weight_dtype, self.momentum_dtype)
        return update.row_step_bytes(num_rows, num_cols, dtypes, self.device, self.maximize)

    def stack(self, num_matrices: int, source_dtype: torch.dtype | None) -> int:
        return newton_schulz_bytes(
            num_matrices,
            *self.matrix_shape,
            len(self.coefficients),
            coefficients=self.coefficients,
            dtype=self.dtype,
            source_dtype=source_dtype,
            device_type=self.device,
        )


def make_entry(
    parameter: Tensor, group: Mapping[str, Any], layout: Layout, momentum_dtype: torch.dtype, ns_dtype: torch.dtype
) -> Entry:
    """The plan's entry of a Muon parameter.

    Args:
        parameter, group: it, and the group that it is in.
        layout: of the parameter.
        momentum_dtype: of its state.
        ns_dtype: of Newton-Schulz.

    Raises:
        ValueError: the group has been given other ``chunks`` or ``stack_dims`` since its layout was made.
    """
    _check_layout(parameter, group, layout)
    coefficients = resolve_coefficients(group["ns_coefficients"], group["ns_steps"])
    device = compute_device(local_tensor(parameter))
    return Entry(
        name_of(group, parameter),
        layout,
        momentum_dtype,
        device,
        (coefficients, group["eps"], ns_dtype),
        flops_per_matrix(layout, group, device),
        KernelWorkspace(
            layout.matrix_shape, coefficients, ns_dtype, parameter.dtype, momentum_dtype, device, group["maximize"]
        ),
    )


def _check_layout(parameter: Tensor, group: Mapping[str, Any], layout: Layout) -> None:
    stack_dims = default_stack_dims(parameter.ndim) if group["stack_dims"] is None else group["stack_dims"]
    if (group["chunks"], stack_dims) != (layout.chunks, layout.stack_dims):
        raise ValueError(
            f"chunks={group['chunks']!r}, stack_dims={group['stack_dims']!r} in a group that was built with chunks="
            f"{layout.chunks}, stack_dims={layout.stack_dims} for parameter {name_of(group, parameter)!r}: which "
            "matrices a parameter is stays as it was built. Build another optimizer."
        )
