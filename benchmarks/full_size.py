"""The optimizer's real step at full size, without the hardware.

    python benchmarks/full_size.py --out benchmarks/results/full_size.json --markdown docs/full-size.md
    python benchmarks/full_size.py --presets 15B --ranks 8 4096                # a table on standard output
    python benchmarks/full_size.py --presets 15B --ranks 512 --shards 8        # HSDP: 64 replicas of 8 shards

The parameters of a preset become DTensors of fake tensors, sharded by rows over a fake process group, and
`PeriodicRowMuon.step()` runs as it is. Nothing is computed and nothing is sent, but everything is counted: FLOPs by
torch's FlopCounterMode, collectives where torch dispatches them, bytes by the optimizer's own counter, memory by the
storages that come and go. If any of it isn't what the plan says, the run fails; so it does if the step reads a value.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import rowmuon
from rowdit.cost.live_bytes import LiveBytes
from rowdit.models.dit import DiT
from rowdit.models.presets import preset
from rowmuon.plan import StepPlan

PRESETS = ("1.3B", "2B", "4B", "9B", "15B")
RANKS = (8, 64, 256, 1024, 4096)
HSDP_PRESET, HSDP_RANKS, HSDP_SHARDS = "15B", (64, 256, 1024, 4096), 8
SHARING = {"chosen": None, "never": float("inf"), "always": 0.0}
"""FLOPs per byte under which the plan decides whether replicas share the work; None is the optimizer's own figure."""


@dataclass(frozen=True)
class Row:
    """One configuration, on rank 0, which no rank exceeds in FLOPs: counted, and beside it what the plan says.

    num_shards: ranks that hold the model between them; num_ranks / num_shards of those are replicas.
    sharing: a key of `SHARING`; shares_replicas is what came of it.
    num_busy_ranks: ranks that orthogonalise anything in a refresh.
    refresh_bytes_sent_mean: over all ranks, by arithmetic (`mean_bytes_of_refresh`); None where replicas share.
    The mean over a period is (refresh + (K - 1) row) / K.
    """

    preset: str
    num_parameters: int
    num_ranks: int
    num_shards: int
    refresh: str
    period: int
    sharing: str
    shares_replicas: bool
    num_matrices: int
    num_busy_ranks: int
    refresh_flops: int
    planned_refresh_flops: int
    refresh_bytes_sent: int
    planned_refresh_bytes_sent: int
    refresh_bytes_sent_mean: float | None
    refresh_collectives: int
    planned_refresh_collectives: int
    refresh_peak_bytes: int
    planned_refresh_peak_bytes: int
    row_flops: int
    row_bytes_sent: int
    row_collectives: int
    row_peak_bytes: int
    planned_row_peak_bytes: int

    @property
    def mean_flops(self) -> float:
        return (self.refresh_flops + (self.period - 1) * self.row_flops) / self.period

    @property
    def mean_bytes_sent(self) -> float:
        return (self.refresh_bytes_sent + (self.period - 1) * self.row_bytes_sent) / self.period

    def disagreements(self) -> list[str]:
        """Where what was counted isn't what was planned. A peak may be up to 30 % below its plan, but never above."""
        planned = {
            "refresh_flops": self.planned_refresh_flops,
            "refresh_bytes_sent": self.planned_refresh_bytes_sent,
            "refresh_collectives": self.planned_refresh_collectives,
            "row_flops": 0,
            "row_bytes_sent": 0,
            "row_collectives": 0,
        }
        peaks = {
            "refresh_peak_bytes": self.planned_refresh_peak_bytes,
            "row_peak_bytes": self.planned_row_peak_bytes,
        }
        found = {key: getattr(self, key) for key in (*planned, *peaks)}
        wrong = [key for key in planned if found[key] != planned[key]]
        wrong += [key for key in peaks if not found[key] <= peaks[key] <= 1.3 * found[key]]
        return [f"{key}: {found[key]:,}, planned {(planned | peaks)[key]:,}" for key in wrong]


class Collectives(TorchDispatchMode):
    """Counts the collectives that torch dispatches, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name()
        return func(*args, **(kwargs or {}))


def fake_parameters(name: str, mesh: DeviceMesh) -> tuple[nn.Module, int]:
    """A preset's model with fake DTensors for parameters, and their number. Call it under a fake mode.

    Rows are split over the last axis of the mesh; a first one replicates (HSDP).
    """
    with torch.device("meta"):
        model = DiT(preset(name))
    num_shards, num_parameters = mesh.shape[-1], 0
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    for module in model.modules():
        for key, value in list(module.named_parameters(recurse=False)):
            if not value.requires_grad:
                delattr(module, key)
                continue
            num_parameters += value.numel()
            rows = -(-value.shape[0] // num_shards)
            local = torch.empty(min(rows, value.shape[0]), *value.shape[1:])
            shard = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
            )
            setattr(module, key, nn.Parameter(shard))
    return model, num_parameters


def optimizer_for(model: nn.Module, refresh: str, period: int, sharing: str = "chosen") -> rowmuon.PeriodicRowMuon:
    groups = rowmuon.param_groups(model, rowmuon.rules.DIT)
    optimizer = rowmuon.PeriodicRowMuon(groups, 1e-3, period=period, refresh=refresh, adjust_lr_fn="match_rms_adamw")
    if SHARING[sharing] is not None:
        optimizer.options = dataclasses.replace(optimizer.options, flops_per_byte=SHARING[sharing])
    return optimizer


def mean_bytes_of_refresh(plan: StepPlan) -> float | None:
    """Bytes that a rank sends in a refresh, the mean over all ranks; None where replicas share the work.

    Every rank of a gather sends the same. In an exchange all elements of a matrix but those that its owner holds go to
    the owner, and as many come back. The plan knows it rank by rank, but of thousands that takes minutes.
    """
    total = 0.0
    for bucket in plan.buckets:
        if bucket.shares_replicas:
            return None
        if bucket.kind == "gather":
            route = bucket.route(0)
            total += (len(route.group) - 1) * route.send_counts[0] * bucket.comm_dtype.itemsize
        elif bucket.kind == "exchange":
            for matrix in bucket.matrices:
                layout = bucket.layouts[matrix.entry]
                owner = layout.shard_group(0)[matrix.owner[1]]
                away = matrix.box.numel - matrix.box.intersect(layout.box(owner)).numel
                total += 2 * away * bucket.comm_dtype.itemsize / layout.num_shards
    return total


def measure(name: str, num_ranks: int, num_shards: int, refresh: str, period: int, sharing: str = "chosen") -> Row:
    """Runs a refresh and, if there are any, a row step. The default process group is a fake one of ``num_ranks``."""
    shape = (num_ranks,) if num_shards == num_ranks else (num_ranks // num_shards, num_shards)
    mesh = init_device_mesh("cpu", shape)  # its ranks are real numbers, so not under the fake mode
    with FakeTensorMode():
        model, num_parameters = fake_parameters(name, mesh)
        optimizer = optimizer_for(model, refresh, period, sharing)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        plan = optimizer.plan("refresh")
        flops, peak, sent = ({"refresh": 0, "row": 0} for _ in range(3))
        for _ in range(min(period, 2)):
            kind = optimizer.next_step_kind
            with FlopCounterMode(display=False) as counter, Collectives() as collectives, LiveBytes() as live:
                optimizer.step()
            flops[kind], peak[kind], sent[kind] = counter.get_total_flops(), live.peak, collectives.num
    matrices = [matrix for bucket in plan.buckets for matrix in bucket.matrices]
    loads: dict[tuple[int, int], int] = {}
    for bucket in plan.buckets:
        for matrix in bucket.matrices:
            loads[matrix.owner] = loads.get(matrix.owner, 0) + bucket.num_flops
    assert loads[0, 0] == max(loads.values()), "rank 0 doesn't stand for the ranks with most to do"
    num_owners = len(loads)
    shares = any(bucket.shares_replicas for bucket in plan.buckets)
    busy = num_ranks if refresh == "gather" else num_owners * (1 if shares else num_ranks // num_shards)
    done = optimizer.traffic
    return Row(
        preset=name,
        num_parameters=num_parameters,
        num_ranks=num_ranks,
        num_shards=num_shards,
        refresh=refresh,
        period=period,
        sharing=sharing,
        shares_replicas=shares,
        num_matrices=len(matrices),
        num_busy_ranks=busy,
        refresh_flops=flops["refresh"],
        planned_refresh_flops=plan.num_flops(0),
        refresh_bytes_sent=done["refresh"].bytes_sent,
        planned_refresh_bytes_sent=plan.bytes_sent(0),
        refresh_bytes_sent_mean=mean_bytes_of_refresh(plan),
        refresh_collectives=sent["refresh"],
        planned_refresh_collectives=plan.num_collectives(0),
        refresh_peak_bytes=peak["refresh"],
        planned_refresh_peak_bytes=plan.peak_bytes(0),
        row_flops=flops["row"],
        row_bytes_sent=done["row"].bytes_sent,
        row_collectives=sent["row"],
        row_peak_bytes=peak["row"],
        planned_row_peak_bytes=optimizer.plan("row").peak_bytes(0) if period > 1 else 0,
    )


def measure_here(name: str, num_ranks: int, num_shards: int) -> list[Row]:
    """All settings of one preset on one mesh, in this process, which must have no process group yet."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    if num_shards < num_ranks:
        settings = SHARING if name == HSDP_PRESET else ["chosen"]
        return [measure(name, num_ranks, num_shards, "exchange", 3, sharing) for sharing in settings]
    return [measure(name, num_ranks, num_shards, refresh, k) for refresh in ("gather", "exchange") for k in (1, 3)]


def in_own_process(name: str, num_ranks: int, num_shards: int) -> list[Row]:
    """`measure_here` in a process of its own: a fake process group can't change its size."""
    command = [sys.executable, __file__, "--presets", name, "--ranks", str(num_ranks), "--shards", str(num_shards)]
    done = subprocess.run([*command, "--here"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return [Row(**row) for row in json.loads(done.stdout)]


# ------------------------------------------------------------------------------------------------------------ report


def table(rows: Sequence[Row]) -> str:
    """Markdown: one row per preset, ranks, refresh and period."""
    lines = [
        "| preset | ranks | `refresh` | K | MB sent per step by rank 0 | by the mean rank | TFLOP per step | "
        "ranks that orthogonalise | collectives of a refresh | peak of a refresh, MB | of a row step, MB |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        assert row.refresh_bytes_sent_mean is not None, "only replicas that share have no such mean"
        row_peak = f"{row.row_peak_bytes / 1e6:,.1f}" if row.period > 1 else ""
        lines.append(
            f"| {row.preset} | {row.num_ranks} | {row.refresh} | {row.period} | {row.mean_bytes_sent / 1e6:,.1f} | "
            f"{row.refresh_bytes_sent_mean / row.period / 1e6:,.1f} | {row.mean_flops / 1e12:,.2f} | "
            f"{row.num_busy_ranks} | {row.refresh_collectives} | {row.refresh_peak_bytes / 1e6:,.1f} | {row_peak} |"
        )
    return "\n".join(lines)


def hsdp_table(rows: Sequence[Row]) -> str:
    """Markdown: what the plan chose, replicas that share the work or not; and the other way, where that was run."""
    lines = [
        "| preset | ranks | replicas x shards | replicas | chosen | MB sent per refresh | TFLOP per refresh | "
        "ranks that orthogonalise | collectives | peak, MB |",
        "|---|---:|---|---|---|---:|---:|---:|---:|---:|",
    ]
    chosen = {(row.preset, row.num_ranks): row.shares_replicas for row in rows if row.sharing == "chosen"}
    for row in rows:
        is_chosen = chosen.get((row.preset, row.num_ranks)) == row.shares_replicas
        if row.sharing == "chosen" or not is_chosen:
            lines.append(
                f"| {row.preset} | {row.num_ranks} | {row.num_ranks // row.num_shards} x {row.num_shards} | "
                f"{'share the work' if row.shares_replicas else 'each do all of it'} | {'yes' if is_chosen else ''} | "
                f"{row.refresh_bytes_sent / 1e6:,.0f} | {row.refresh_flops / 1e12:,.1f} | {row.num_busy_ranks} | "
                f"{row.refresh_collectives} | {row.refresh_peak_bytes / 1e6:,.0f} |"
            )
    return "\n".join(lines)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """The tables under the names that mark their places in the page."""
    sharded = [row for row in rows if row.num_shards == row.num_ranks]
    hsdp = [row for row in rows if row.num_shards < row.num_ranks]
    return {name: text(part) for name, text, part in (("sharded", table, sharded), ("hsdp", hsdp_table, hsdp)) if part}


def insert(page: str, parts: dict[str, str]) -> str:
    """The page with each table between its marks, ``<!-- name -->`` and ``<!-- /name -->``."""
    for name, text in parts.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        head, _, rest = page.partition(begin)
        _, found, tail = rest.partition(end)
        if not found:
            raise ValueError(f"the page has no place for the table {name!r}: {begin.strip()} ... {end.strip()}")
        page = head + begin + text + end + tail
    return page


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", help=f"default: {' '.join(PRESETS)}, with and without HSDP")
    parser.add_argument("--ranks", nargs="+", type=int, help=f"default: {' '.join(map(str, RANKS))}")
    parser.add_argument("--shards", type=int, help="ranks of one replica; default: all, so that there is only one")
    parser.add_argument("--out", type=Path, help="write everything there as JSON")
    parser.add_argument("--markdown", type=Path, help="put the tables into that page")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.here:
        (name,), (num_ranks,) = options.presets, options.ranks
        print(json.dumps([asdict(row) for row in measure_here(name, num_ranks, options.shards)]))
        return
    runs = [(p, n, options.shards or n) for p in options.presets or PRESETS for n in options.ranks or RANKS]
    if not (options.presets or options.ranks or options.shards):
        runs += [(p, n, HSDP_SHARDS) for p in PRESETS for n in HSDP_RANKS]
    rows = []
    for name, num_ranks, num_shards in runs:
        print(f"{name} on {num_ranks} ranks, {num_shards} of them one replica", file=sys.stderr, flush=True)
        rows += in_own_process(name, num_ranks, num_shards)
        wrong = [problem for row in rows for problem in row.disagreements()]
        if wrong:
            raise SystemExit(f"{name} on {num_ranks} ranks: " + "; ".join(wrong))
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(insert(options.markdown.read_text(encoding="utf-8"), tables(rows)), "utf-8")
    print("\n\n".join(tables(rows).values()))


if __name__ == "__main__":
    main()
