"""What the plan is told of each parameter, its layout and what the arithmetic on it costs, and the plans themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rowmuon import gram, update
from rowmuon.coefficients import Triple, resolve_coefficients
from rowmuon.device import compute_device
from rowmuon.factors import gram_shape
from rowmuon.groups import PLAN_KEYS, flops_per_matrix, name_of, position_of
from rowmuon.layout import Layout, local_tensor
from rowmuon.orthogonalize import newton_schulz_bytes
from rowmuon.plan import Entry, PlanOptions, StepPlan, build_plan
from rowmuon.routing import default_stack_dims

__all__ = ["KernelWorkspace", "Plans", "make_entry"]


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

    def part_ahead(self, num_rows: int, num_cols: int, sent: torch.dtype) -> int:
        taken = update.block_bytes(num_rows, num_cols, [self.momentum_dtype], self.device)
        return taken + max(self.momentum(num_rows, num_cols), self.part(num_rows, num_cols, sent, self.weight_dtype))

    def rows(self, num_rows: int, num_cols: int) -> tuple[int, int]:
        dtypes = (self.weight_dtype, self.momentum_dtype)
        return update.row_step_bytes(num_rows, num_cols, dtypes, self.device, self.maximize)

    def gram(self, num_rows: int, num_cols: int, dtype: torch.dtype) -> int:
        dtypes = (self.momentum_dtype, self.weight_dtype)
        return gram.add_gram_bytes(num_rows, num_cols, dtypes, dtype, self.device, self.maximize)

    def gram_rows(self, num_rows: int, num_cols: int, dtype: torch.dtype) -> int:
        dtypes = (self.weight_dtype, self.momentum_dtype)
        return gram.gram_row_step_bytes(num_rows, num_cols, dtypes, dtype, self.device, self.maximize)

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
    parameter: Tensor,
    group: Mapping[str, Any],
    layout: Layout,
    momentum_dtype: torch.dtype,
    ns_dtype: torch.dtype,
    options: PlanOptions,
) -> Entry:
    """The plan's entry of a Muon parameter.

    Args:
        parameter, group: it, and the group that it is in.
        layout: of the parameter.
        momentum_dtype: of its state.
        ns_dtype: of Newton-Schulz.
        options: of the optimizer.

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
        flops_per_matrix(layout, group, device, options.ns_kernels),
        KernelWorkspace(
            layout.matrix_shape, coefficients, ns_dtype, parameter.dtype, momentum_dtype, device, group["maximize"]
        ),
        # A group has its parameters in the order of the model, whatever part of it they are.
        (position_of(group, parameter) + 0.5) / len(group["params"]),
        gram_shape(layout, options, ns_dtype),
    )


class Plans(dict[tuple, StepPlan]):
    """An optimizer's plans, one for each set of refreshing parameters that has occurred."""

    @staticmethod
    def key(muon: Sequence[tuple[Tensor, Mapping[str, Any], bool]]) -> tuple:
        """What a plan depends on; ``muon`` are (parameter, group, whether it refreshes)."""
        groups = {id(group): group for _, group, _ in muon}
        settings = (repr([group[key] for key in PLAN_KEYS]) for group in groups.values())
        return (*settings, *((id(parameter), due) for parameter, _, due in muon))

    def of(
        self,
        muon: Sequence[tuple[Tensor, Mapping[str, Any], bool]],
        entries: Callable[[], Sequence[Entry]],
        options: PlanOptions,
    ) -> StepPlan:
        key = self.key(muon)
        plan = self.get(key)
        if plan is None:
            if len(self) > 64:  # a schedule, or freezing and unfreezing, has changed the sets
                self.clear()
            due = [i for i, (_, _, due) in enumerate(muon) if due]
            plan = self[key] = build_plan(entries(), due, options)
        return plan


def _check_layout(parameter: Tensor, group: Mapping[str, Any], layout: Layout) -> None:
    stack_dims = default_stack_dims(parameter.ndim) if group["stack_dims"] is None else group["stack_dims"]
    if (group["chunks"], stack_dims) != (layout.chunks, layout.stack_dims):
        raise ValueError(
            f"chunks={group['chunks']!r}, stack_dims={group['stack_dims']!r} in a group that was built with chunks="
            f"{layout.chunks}, stack_dims={layout.stack_dims} for parameter {name_of(group, parameter)!r}: which "
            "matrices a parameter is stays as it was built. Build another optimizer."
        )
