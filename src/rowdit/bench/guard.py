"""The benchmark that fails: what a step costs must not get worse by more than a stated margin.

Counts and ratios, never times. What is sent, how often, and how much memory a step takes are exact for a given model
and number of ranks, so they have no margin; nor has the number of recompilations, which is zero. Ratios are medians of
steps in turn, on one thread. They were measured on one machine and are held on others, busy ones too, so their margins
are wide: what they catch is a path that fell back to a slow one, not a few per cent. A ratio that is over its limit is
measured again, twice; a machine that was disturbed then passes, and a slow path doesn't.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rowdit.bench.contender import Workplace, periodic
from rowdit.bench.measure import PERIOD, Measured, find_peers, measure
from rowdit.bench.peers import PEERS
from rowdit.bench.shapes import dit_matrices
from rowdit.bench.spread import table

__all__ = ["LIMITS", "Limit", "judge", "measure_counts", "measure_ratios", "page", "run_guard"]

_HIDDEN, _DEPTH, _NUM_RANKS = 384, 1, 4
_NUM_ATTEMPTS = 3


@dataclass(frozen=True)
class Limit:
    """`value` was measured when the limit was set; `margin` is the factor over it that is still accepted."""

    name: str
    value: float
    margin: float = 1.0

    @property
    def at_most(self) -> float:
        return self.value * self.margin


# One DiT-S block. Counts: the rank of 4 that does most, fp32 parameters, rows sharded, bf16 sent; all buckets of so
# small a model are under way at once, for together they are far below bucket_bytes. Ratios: one thread of an AMD EPYC
# with AVX-512. Beyond the margins are a Newton-Schulz in fp32 or without the Gram form, a row step that makes twice its
# passes over memory, and one that orthogonalises.
LIMITS: tuple[Limit, ...] = (
    Limit("exchange, refresh step: collectives", 10),
    Limit("exchange, refresh step: bytes sent", 2_211_840),
    Limit("exchange, refresh step: orthogonalisations", 2),
    Limit("exchange, refresh step: temporary bytes", 9_584_736),
    Limit("exchange, row step: collectives", 0),
    Limit("exchange, row step: bytes sent", 0),
    Limit("exchange, row step: orthogonalisations", 0),
    Limit("exchange, row step: temporary bytes", 889_344),
    Limit("gather, refresh step: collectives", 5),
    Limit("gather, refresh step: bytes sent", 3_981_312),
    Limit("gather, refresh step: orthogonalisations", 5),
    Limit("gather, refresh step: temporary bytes", 12_681_312),
    Limit("gather, row step: collectives", 0),
    Limit("gather, row step: bytes sent", 0),
    Limit("gather, row step: orthogonalisations", 0),
    Limit("gather, row step: temporary bytes", 889_344),
    Limit("recompilations after the first period", 0),
    Limit("row_over_adamw_fused", 1.5, margin=1.7),
    Limit("k1_over_torch_muon", 0.72, margin=1.3),
    Limit("k3_over_k1", 0.36, margin=1.35),
)


def measure_counts() -> dict[str, float]:
    """What the rank of 4 that sends or takes most does in a step, from the plans that the runtime executes.

    Nothing is sent here; that steps do what their plans say is what the distributed tests hold.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    matrices, ranks = dit_matrices(_HIDDEN, _DEPTH), range(_NUM_RANKS)
    found: dict[str, float] = {}
    dist.init_process_group("fake", rank=0, world_size=_NUM_RANKS, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (_NUM_RANKS,))
        for refresh in ("exchange", "gather"):
            optimizer = periodic(matrices, Workplace(mesh=mesh), PERIOD, refresh=refresh).optimizer
            for kind in ("refresh", "row"):
                plan, name = optimizer.plan(kind), f"{refresh}, {kind} step"  # type: ignore[attr-defined]
                found[f"{name}: collectives"] = max(map(plan.num_collectives, ranks))
                found[f"{name}: bytes sent"] = max(map(plan.bytes_sent, ranks))
                found[f"{name}: orthogonalisations"] = max(map(plan.num_orthogonalizations, ranks))
                found[f"{name}: temporary bytes"] = max(map(plan.peak_bytes, ranks))
    finally:
        dist.destroy_process_group()
    if _can_compile():
        found["recompilations after the first period"] = _count_recompilations()
    return found


def _can_compile() -> bool:
    return bool(shutil.which("g++") or shutil.which("clang++"))


def _count_recompilations() -> int:
    """Graphs that are compiled in two periods after the first one, while lr follows a schedule."""
    from torch._dynamo.utils import counters

    contender = periodic(dit_matrices(64, 1), Workplace(), PERIOD, compile=True)
    contender.timed_period(PERIOD)
    before = counters["stats"]["unique_graphs"]
    for index in range(2 * PERIOD):
        for group in contender.optimizer.param_groups:
            group["lr"] = 1e-3 / (2 + index)
        contender.timed_step()
    return counters["stats"]["unique_graphs"] - before


def measure_ratios() -> dict[str, float]:
    """Ratios of one DiT-S block, on the threads that torch uses."""
    workplace = Workplace()
    peers = find_peers([peer for peer in PEERS if peer.name == "torch_muon"], workplace)
    measured: Measured = measure(
        dit_matrices(_HIDDEN, _DEPTH), _HIDDEN, workplace, peers, num_rounds=7, num_pairs=30, num_warmups=2
    )
    ratios = {name: spread.median for name, spread in measured.ratios().items()}
    return {name: ratios[name] for name in ("row_over_adamw_fused", "k1_over_torch_muon", "k3_over_k1")}


def judge(found: Mapping[str, float], limits: Sequence[Limit] | None = None) -> list[str]:
    """What is over its limit, or without one: a line each."""
    known = {limit.name: limit for limit in (LIMITS if limits is None else limits)}
    wrong = []
    for name, value in found.items():
        if name not in known:
            wrong.append(f"{name}: {value:g} has no limit")
        elif not value <= known[name].at_most:
            limit = known[name]
            wrong.append(f"{name}: {value:g}, over {limit.at_most:g} ({limit.value:g} x {limit.margin:g})")
    return wrong


def run_guard(
    counts: Callable[[], dict[str, float]] = measure_counts,
    ratios: Callable[[], dict[str, float]] = measure_ratios,
    limits: Sequence[Limit] | None = None,
) -> tuple[dict[str, float], list[str]]:
    """(everything measured, what is wrong with it); of ratios the least of up to three attempts."""
    found = counts()
    wrong = judge(found, limits)
    best: dict[str, float] = {}
    for _ in range(_NUM_ATTEMPTS):
        for name, value in ratios().items():
            best[name] = min(value, best.get(name, value))
        if not judge(best, limits):
            break
    return found | best, wrong + judge(best, limits)


def page(found: Mapping[str, float], limits: Sequence[Limit] | None = None) -> str:
    """A table of what was measured, its limits and where they are passed."""
    known = {limit.name: limit for limit in (LIMITS if limits is None else limits)}
    rows = [
        [name, f"{value:g}", f"{known[name].at_most:g}" if name in known else "", "**no**" if bad else "yes"]
        for name, value in found.items()
        for bad in [bool(judge({name: value}, limits))]
    ]
    return table(["one DiT-S block", "measured", "at most", "within"], rows)
