"""The measurement: contenders take their steps in turn, in one process or on one set of ranks, compared by round.

The order is reversed every other round, so a machine that is shared or that changes its clock moves all contenders, and
the ratios hold. A ratio is the median, over rounds, of the ratio within a round. On several ranks a step takes as long
as its slowest rank.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rowdit.bench.check import Check, check_optimizer
from rowdit.bench.contender import Contender, Workplace, periodic
from rowdit.bench.machine import best_product
from rowdit.bench.peers import LR, PEERS, WEIGHT_DECAY, Make, Peer, load_peer
from rowdit.bench.shapes import Matrix
from rowdit.bench.spread import Spread

__all__ = ["PERIOD", "Measured", "Peers", "find_peers", "in_turn", "measure"]

PERIOD = 3


@dataclass
class Peers:
    """Which peers take part, and why the others don't."""

    makers: dict[str, Make] = field(default_factory=dict)
    checks: dict[str, Check] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass
class Measured:
    """Seconds of each timed step by contender, the slowest rank's; `k3` holds means over whole periods.

    `setting`: see `measure`. `refresh_flops` is what a rank computes in a refresh, in the mean; "matmul" is the time
    that as many take in plain products, in turn with the steps (not on ranks, which share their cores).
    """

    seconds: dict[str, list[float]]
    setting: str
    refresh_flops: float = 0.0

    def spread(self, name: str) -> Spread:
        return Spread.of(self.seconds[name])

    def ratios(self) -> dict[str, Spread]:
        """By name, `a_over_b`. Absent where a contender is."""
        pairs = {
            "row_over_adamw_fused": (f"row {self.setting}", "adamw_fused"),
            "row_eager_over_adamw_fused": ("row eager", "adamw_fused"),
            "k3_over_k1": ("k3", "k1"),
            "refresh_over_matmul": ("matmul", "k1"),
        }
        for peer in PEERS:
            pairs |= {f"{k}_over_{peer.name}": (k, peer.name) for k in ("k1", "k3")}
        return {
            name: Spread.of_ratio(self.seconds[above], self.seconds[below])
            for name, (above, below) in pairs.items()
            if self.seconds.get(above) and self.seconds.get(below)
        }


def row_settings(device: str) -> dict[str, dict[str, bool]]:
    """The documented settings of a row step that this machine can run."""
    can_compile = device != "cpu" or bool(shutil.which("g++") or shutil.which("clang++"))
    return {"eager": {"compile": False}, **({"compiled": {"compile": True}} if can_compile else {})}


def find_peers(wanted: Sequence[Peer], workplace: Workplace) -> Peers:
    """Imports each, and checks its update. One that raises is left out; one that is wrong is timed, and said so."""
    found = Peers()
    for peer in wanted:
        maker, reason = load_peer(peer)
        if maker is not None and peer.needs_dtensors and workplace.mesh is None:
            maker, reason = None, "takes sharded parameters only: start with --ranks 2, or under torchrun"
        if _any_rank_lacks(maker, workplace):
            found.skipped[peer.name] = reason or "another rank lacks it"
            continue
        assert maker is not None
        check = check_optimizer(maker, workplace)
        if check.error:
            found.skipped[peer.name] = f"fails: {check.error}"
            continue
        found.makers[peer.name], found.checks[peer.name] = maker, check
        found.versions[peer.name] = peer.version()
    return found


def measure(
    matrices: Sequence[Matrix],
    hidden: int,
    workplace: Workplace,
    peers: Peers,
    *,
    num_rounds: int,
    num_pairs: int,
    num_warmups: int = 2,
) -> Measured:
    """Times one size.

    First a row step in every setting against fused AdamW, ``num_pairs`` times each. The setting whose median is less is
    this size's `setting`, in which then K = 1 and K = 3 (a whole period) run ``num_rounds`` rounds with the peers.
    """
    times = _time_rows(matrices, workplace, num_pairs, num_warmups)
    settings = row_settings(workplace.device)
    setting = min(settings, key=lambda name: Spread.of(times[f"row {name}"]).median)

    ours = {name: periodic(matrices, workplace, k, **settings[setting]) for name, k in (("k1", 1), ("k3", PERIOD))}
    theirs = {name: Contender(matrices, workplace, make, split=True) for name, make in peers.makers.items()}
    for _ in range(num_warmups):
        ours["k1"].timed_step()
        ours["k3"].timed_period(PERIOD)
        for contender in theirs.values():
            contender.timed_step()
    plan = ours["k1"].optimizer.plan("refresh")  # type: ignore[attr-defined]
    flops = sum(plan.num_flops(rank) for rank in range(workplace.num_ranks)) / workplace.num_ranks
    steps: dict[str, list[float]] = {name: [] for name in ("k1", "k3 refresh", "k3 row", *theirs)}

    def period() -> None:
        refresh, *rows = ours["k3"].timed_period(PERIOD)
        steps["k3 refresh"].append(refresh)
        steps["k3 row"].extend(rows)

    def one(name: str, contender: Contender, kind: str | None) -> Callable[[], None]:
        return lambda: steps[name].append(contender.timed_step(kind))

    actions = [one("k1", ours["k1"], "refresh"), period, *(one(name, c, None) for name, c in theirs.items())]
    if workplace.mesh is None:
        product, steps["matmul"] = best_product(hidden, workplace.device), []
        actions.append(lambda: steps["matmul"].append(product.seconds(flops)))
    in_turn(num_rounds, actions)
    times |= _slowest(steps, workplace)
    rows = times["k3 row"]
    times["k3"] = [
        (refresh + sum(rows[i * (PERIOD - 1) : (i + 1) * (PERIOD - 1)])) / PERIOD
        for i, refresh in enumerate(times["k3 refresh"])
    ]
    return Measured(times, setting, flops)


def _time_rows(
    matrices: Sequence[Matrix], workplace: Workplace, num_pairs: int, num_warmups: int
) -> dict[str, list[float]]:
    def adamw(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.95), fused=True)

    contenders: dict[str, tuple[Contender, str | None]] = {
        f"row {name}": (periodic(matrices, workplace, None, **options), "row")
        for name, options in row_settings(workplace.device).items()
    }
    for contender, _ in contenders.values():
        contender.timed_step()  # the first step of any period is a refresh
    contenders["adamw_fused"] = (Contender(matrices, workplace, adamw), None)
    steps: dict[str, list[float]] = {name: [] for name in contenders}
    for contender, kind in contenders.values():
        for _ in range(num_warmups):
            contender.timed_step(kind)

    def one(name: str) -> Callable[[], None]:
        contender, kind = contenders[name]
        return lambda: steps[name].append(contender.timed_step(kind))

    in_turn(num_pairs, [one(name) for name in contenders])
    return _slowest(steps, workplace)


def in_turn(num_rounds: int, actions: Sequence[Callable[[], None]]) -> None:
    """Runs all actions ``num_rounds`` times, in reversed order every other round."""
    for index in range(num_rounds):
        for action in actions if index % 2 == 0 else reversed(actions):
            action()


def _slowest(steps: Mapping[str, list[float]], workplace: Workplace) -> dict[str, list[float]]:
    """Each step's time on its slowest rank."""
    if workplace.mesh is None:
        return dict(steps)
    out = {}
    for name, values in steps.items():
        times = torch.tensor(values, dtype=torch.float64, device=workplace.device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        out[name] = times.tolist()
    return out


def _any_rank_lacks(maker: object, workplace: Workplace) -> bool:
    lacks = torch.tensor(float(maker is None), device=workplace.device)
    if workplace.mesh is not None:
        dist.all_reduce(lacks, dist.ReduceOp.MAX)
    return bool(lacks)
