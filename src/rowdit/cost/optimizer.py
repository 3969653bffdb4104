"""The optimizer's plan on a mesh, as its constructor would make it there, and what the step takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

import rowmuon
from rowdit.cost import traffic
from rowdit.cost.mesh import RankMesh
from rowdit.cost.traffic import Spread
from rowdit.train.config import OptimizerConfig
from rowdit.train.optimizers import build_optimizer
from rowmuon.plan import Entry, PlanOptions, StepPlan, build_plan

Refresh = Literal["exchange", "gather"]


@dataclass(frozen=True)
class StepCost:
    """One kind of step, over all ranks: bytes sent and matmul FLOPs; collectives and peak memory of the busiest."""

    bytes_sent: Spread
    flops: Spread
    num_collectives: int
    num_orthogonalizations: int
    peak_bytes: int

    @staticmethod
    def of(plan: StepPlan | None) -> StepCost:
        """None: a step that isn't Muon's."""
        if plan is None or not plan.entries:
            return StepCost(Spread(0.0, 0), Spread(0.0, 0), 0, 0, 0)
        ranks = traffic.representative_ranks(plan, at_most=16)
        return StepCost(
            Spread.of(traffic.bytes_sent(plan)),
            Spread.of(traffic.flops(plan)),
            max(map(plan.num_collectives, ranks)),
            traffic.most_orthogonalizations(plan),
            max(map(plan.peak_bytes, ranks)),
        )


@dataclass(frozen=True)
class Routed:
    """A parameter and what the optimizer makes of it.

    state_bytes: for each element, in the optimizer's state.
    whole_bytes: beside that, on every rank (factors of Gram row steps).
    mean_shape, mean_bytes: of what is split by rows beside that (means of Gram matrices), and bytes of an element.
    """

    name: str
    shape: tuple[int, ...]
    algorithm: str
    chunks: int
    state_bytes: int
    whole_bytes: int = 0
    mean_shape: tuple[int, ...] = (0,)
    mean_bytes: int = 0

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class OptimizerCost:
    """Of one optimizer on one mesh.

    refresh_share: refreshes among all steps; 1 / K for a period K.
    """

    parameters: tuple[Routed, ...]
    refresh_share: float
    refresh_plan: StepPlan | None
    row_plan: StepPlan | None
    refresh: StepCost
    row: StepCost

    @cached_property
    def rank_works(self) -> list[tuple[traffic.RankWork, ...]]:
        """`rowdit.cost.traffic.rank_works` of a refresh."""
        return traffic.rank_works(self.refresh_plan) if self.refresh_plan else []

    def mean(self, quantity: Literal["bytes_sent", "flops"]) -> tuple[float, float]:
        """Per step, mean over a period: of the mean rank, and of the rank with most."""
        share = self.refresh_share
        refresh, row = getattr(self.refresh, quantity), getattr(self.row, quantity)
        return (
            share * refresh.mean + (1 - share) * row.mean,
            share * refresh.max + (1 - share) * row.max,
        )


def optimizer_cost(
    model: nn.Module, config: OptimizerConfig, mesh: RankMesh, refresh: Refresh | None = None, device: str = "cuda"
) -> OptimizerCost:
    """Prices the optimizer that ``config`` describes. Call it under :func:`rowdit.cost.fake.fake_mode`.

    Args:
        model: its fake parameters, whole.
        config: as for training.
        mesh: on which the parameters lie.
        refresh: "exchange" or "gather"; None is the config's own.
        device: "cuda" or "cpu". Newton-Schulz leaves out half of the large symmetric products on a CPU.
    """
    optimizer = build_optimizer(model, config)
    parameters = tuple(_routed(model, optimizer))
    if not isinstance(optimizer, rowmuon.PeriodicRowMuon):
        return OptimizerCost(parameters, 0.0, None, None, StepCost.of(None), StepCost.of(None))
    # The optimizer has decided everything but who holds what: it was built without a process group.
    whole = optimizer.plan("refresh")
    options = whole.options if refresh is None else dataclasses.replace(whole.options, refresh=refresh)
    entries = [_entry_on(entry, mesh, device, options) for entry in whole.entries]
    refresh_plan = build_plan(entries, range(len(entries)), options)
    row_plan = build_plan(entries, (), options)
    row_cost = StepCost.of(row_plan)
    period = optimizer.param_groups[0]["period"]
    return OptimizerCost(parameters, refresh_share(period), refresh_plan, row_plan, StepCost.of(refresh_plan), row_cost)


def refresh_share(period: int | None | Sequence[Any]) -> float:
    """Refreshes among all steps in the long run: of a schedule, under its last K."""
    every = period[-1][1] if isinstance(period, Sequence) else period
    return 0.0 if every is None else 1 / every


def _routed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Sequence[Routed]:
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    routed = []
    for name, parameter in model.named_parameters():
        group = groups.get(parameter)
        if group is None:
            routed.append(Routed(name, tuple(parameter.shape), "frozen", 1, 0))
            continue
        algorithm = group.get("algorithm", "adamw")
        # AdamW keeps two moments. torch's own makes them at the first step, so they can't be read off here.
        state = optimizer.state.get(parameter, {})
        momentum = state.get("momentum_buffer", parameter)
        size = momentum.dtype.itemsize if algorithm == "muon" else 2 * parameter.dtype.itemsize
        kept: tuple[Any, ...] = ()
        if "gram_ema" in state:
            mean = state["gram_ema"]
            kept = (state["gram_factor"].nbytes, tuple(mean.shape), mean.dtype.itemsize)
        routed.append(Routed(name, tuple(parameter.shape), algorithm, group.get("chunks", 1), size, *kept))
    return routed


def _entry_on(entry: Entry, mesh: RankMesh, device: str, options: PlanOptions) -> Entry:
    coefficients, *_ = entry.kernel
    how: Any = {"coefficients": coefficients, "device_type": device, "kernels": options.ns_kernels}
    num_flops = rowmuon.newton_schulz_flops(*entry.layout.matrix_shape, len(coefficients), "auto", **how)
    workspace = dataclasses.replace(entry.workspace, device=device)  # type: ignore[type-var]
    layout = mesh.place(entry.layout)
    return dataclasses.replace(entry, layout=layout, device=device, num_flops=num_flops, workspace=workspace)
