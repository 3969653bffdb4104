"""`rowdit plan`'s seconds held to account: predicted and measured training steps on the emulated cluster.

    python benchmarks/predict_step.py --out benchmarks/results/predict_step.json      # as root, on Linux
    python benchmarks/predict_step.py --out benchmarks/results/predict_step.json --again      # measures nothing

Every rank is a host of its own with one link (`cluster.py`). In one run the ranks first calibrate this machine, all at
the same time, since they share its cores: the rate of the model's forward and backward without FSDP, of Newton-Schulz,
and of copying memory; and how long a tiny all-reduce takes. The links aren't calibrated: their rate is what was set, of
which rings and the optimizer's exchange are taken to reach 0.9: by themselves, at 200 Mbit/s, they reach 0.93 and 0.92
(results/sharded_step.md). Then they train under FSDP2, K = 3, by gather and by exchange, and the medians over the
periods of forward + backward + optimizer + averages are set beside the prediction, for refreshes and row steps apart.
Data and random draws aren't part of either. The calibration is kept, so that the prediction can be made ``--again`` for
what was measured, after a change of the cost model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from cluster import Cluster as Emulated
from cluster import report

import rowmuon
from rowdit.cost import RankMesh, estimate
from rowdit.cost.hardware import Cluster, Link
from rowdit.cost.predict import predict
from rowdit.models import DiT, DiTConfig, forward_flops
from rowdit.train.config import OptimizerConfig, RunConfig, TrainConfig

HIDDEN, DEPTH, IMAGES_PER_RANK, PERIOD = 192, 4, 8, 3
MODEL = DiTConfig(16, 4, 2, hidden_size=HIDDEN, depth=DEPTH, num_heads=4, num_classes=10)
RANKS, RATES_MBIT, MODES = (2, 4), (100.0, 200.0, 400.0), ("gather", "exchange")
RING, ALL_TO_ALL = 0.9, 0.9
KELLER_JORDAN = ((3.4445, -4.7750, 2.0315),) * 5


def run_of(num_ranks: int) -> RunConfig:
    train = TrainConfig(batch_size=IMAGES_PER_RANK * num_ranks, steps=100)
    return RunConfig(MODEL, optimizer=OptimizerConfig("periodic", period=PERIOD), train=train)


# ---------------------------------------------------------------------------------------------------- on the ranks


def rate(work: Callable[[], object], amount: float, seconds: float = 1.0) -> float:
    """``amount`` per call, per second, while all ranks do the same."""
    work()
    dist.barrier()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        work()
        count += 1
    found = torch.tensor(count * amount / (time.perf_counter() - start))
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


def calibrate() -> dict[str, float]:
    model, shape = DiT(MODEL), (IMAGES_PER_RANK, 4, 16, 16)
    x, t, y = torch.randn(shape), torch.rand(IMAGES_PER_RANK), torch.zeros(IMAGES_PER_RANK, dtype=torch.int64)

    def passes() -> None:
        model(x, t, y).square().mean().backward()

    stack = torch.randn(4, HIDDEN, HIDDEN).bfloat16()
    flops = 4 * rowmuon.newton_schulz_flops(HIDDEN, HIDDEN, 5, "auto", device_type="cpu")
    source, target = torch.randn(1 << 22), torch.empty(1 << 22)
    tiny, count = torch.zeros(1), 20
    dist.all_reduce(tiny)
    start = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(tiny)
    seconds = (time.perf_counter() - start) / count
    return {
        "model_flops": rate(passes, 3 * IMAGES_PER_RANK * forward_flops(MODEL)),
        "newton_schulz_flops": rate(lambda: rowmuon.newton_schulz(stack, KELLER_JORDAN, form="auto"), flops),
        "memory": rate(lambda: target.copy_(source), 2 * source.numel() * 4),
        "all_reduce_seconds": seconds,
    }


def work(num_periods: int) -> None:
    from rowdit.data.batch import Batch
    from rowdit.train.state import build_state
    from rowdit.train.step import train_step
    from rowdit.train.world import join_world

    config = run_of(int(os.environ["WORLD_SIZE"]))
    with join_world(config.parallel) as world:
        calibration, measured = calibrate(), {}
        for mode in MODES:
            state = build_state(config, world=world)
            options = state.optimizer.options  # type: ignore[attr-defined]
            state.optimizer.options = dataclasses.replace(options, refresh=mode)  # type: ignore[attr-defined]
            rows = []
            for step in range((num_periods + 1) * PERIOD):
                images = torch.randn(IMAGES_PER_RANK, 4, 16, 16)
                positions = torch.arange(step * IMAGES_PER_RANK, (step + 1) * IMAGES_PER_RANK)
                batch = Batch(images, torch.zeros(IMAGES_PER_RANK, dtype=torch.int64), positions)
                dist.barrier()
                done = train_step(state, batch, config, world)
                if step >= PERIOD:  # the first period makes plans and connections
                    rows.append(dataclasses.asdict(done))
            measured[mode] = rows
        report({"calibration": calibration, "steps": measured})


# ------------------------------------------------------------------------------------------------------ the report


def cluster_of(calibration: dict[str, float], num_ranks: int, rate_mbit: float) -> Cluster:
    """The machine as calibrated: one rank a host."""
    latency = calibration["all_reduce_seconds"] / 2 / num_ranks
    link = Link(rate_mbit * 1e6 / 8, RING, latency, latency, "set by tc", ALL_TO_ALL / RING)
    model, schulz = calibration["model_flops"], calibration["newton_schulz_flops"]
    return Cluster(
        "emulated", schulz, model, 1.0, 1.0, 1.0, calibration["memory"], 1.0, 0.0, 1, link, link, "calibrated",
        overlaps=False, scatter_passes=2.0,
    )  # fmt: skip


PARTS = ("forward_seconds", "backward_seconds", "optimizer_seconds", "ema_seconds")


def compare(reports: Sequence[dict], num_ranks: int, rate_mbit: float) -> list[dict]:
    """A row for each way of refreshing and kind of step."""
    rows = []
    for mode in MODES:
        for kind in ("refresh", "row"):
            steps = [[step for step in per_rank["steps"][mode] if step["kind"] == kind] for per_rank in reports]
            totals = [max(sum(step[part] for part in PARTS) for step in at) for at in zip(*steps, strict=True)]
            of_optimizer = [max(step["optimizer_seconds"] for step in at) for at in zip(*steps, strict=True)]
            rows.append({
                "num_ranks": num_ranks, "rate_mbit": rate_mbit, "refresh_mode": mode, "kind": kind,
                "measured": statistics.median(totals), "measured_least": min(totals),
                "measured_least_optimizer": min(of_optimizer), "measured_optimizer": statistics.median(of_optimizer),
                "calibration": reports[0]["calibration"],
            })  # fmt: skip
    return [with_prediction(row) for row in rows]


def with_prediction(row: dict) -> dict:
    """``row`` with what is predicted for it, from its own calibration."""
    machine = cluster_of(row["calibration"], row["num_ranks"], row["rate_mbit"])
    found = estimate(run_of(row["num_ranks"]), RankMesh(row["num_ranks"]), refresh=row["refresh_mode"], device="cpu")
    expected = predict(found, machine)
    optimizer = expected.refresh if row["kind"] == "refresh" else expected.row
    return {**row, "predicted": expected.rest + optimizer.total, "predicted_optimizer": optimizer.total}


def table(rows: Sequence[dict]) -> str:
    head = "| ranks | Mbit/s | refresh | step | predicted, ms | measured, median | fastest | predicted / median | "
    head += "/ fastest | optimizer: predicted | median | fastest |"
    lines = [head, "|---:|---:|---|---|" + "---:|" * 8]
    for row in rows:
        seen = (row["predicted"], row["measured"], row["measured_least"])
        of_optimizer = (row["predicted_optimizer"], row["measured_optimizer"], row["measured_least_optimizer"])
        ratios = [f"{seen[0] / seen[1]:.2f}", f"{seen[0] / seen[2]:.2f}"]
        cells = [f"{1e3 * value:,.0f}" for value in seen] + ratios + [f"{1e3 * value:,.0f}" for value in of_optimizer]
        setting = f"| {row['num_ranks']} | {row['rate_mbit']:.0f} | {row['refresh_mode']} | {row['kind']} | "
        lines.append(f"{setting}{' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES_MBIT), metavar="MBIT")
    parser.add_argument("--periods", type=int, default=3, help="of each way of refreshing, after one to warm up")
    parser.add_argument("--out", type=Path, help="write everything there as JSON, added to what it holds")
    parser.add_argument("--again", action="store_true", help="only predict anew what --out holds")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.periods)
        return
    rows: list[dict] = json.loads(options.out.read_text()) if options.out and options.out.exists() else []
    rows = [with_prediction(row) for row in rows] if options.again else rows
    for num_ranks in () if options.again else options.ranks:
        for rate_mbit in options.rates:
            with Emulated(num_ranks, rate_mbit, fallback=False) as cluster:
                reports = cluster.run(__file__, ["--worker", "--periods", str(options.periods)])
            print(reports[0]["calibration"], file=sys.stderr)
            fresh = compare(reports, num_ranks, rate_mbit)
            kept = [row for row in rows if (row["num_ranks"], row["rate_mbit"]) != (num_ranks, rate_mbit)]
            rows = sorted([*kept, *fresh], key=lambda row: (row["num_ranks"], row["rate_mbit"]))
            print(table(fresh), file=sys.stderr, flush=True)
            if options.out:
                options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.again and options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
