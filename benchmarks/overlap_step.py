"""What ``overlap="backward"`` hides: training steps of a small DiT under FSDP2 on an emulated cluster.

    python benchmarks/overlap_step.py --save                # 4 ranks at 200 Mbit/s, exchange and gather, K = 1
    python benchmarks/overlap_step.py --batch 64 --refresh gather --save overlap_step_long_backward

Every step is a refresh (K = 1; with K = 3 a third of the gain remains). Beside the whole step the report has the time
within ``step()``: what it waits for shows there. A link is shared by FSDP2's own traffic and by what is sent ahead, so
the gain depends on how long backward computes without sending; both are varied by ``--batch`` and ``--rate``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from cluster import Cluster, report
from reporting import RESULTS, Spread, command_line, machine, machine_line, table, write_results
from train_step import Contender, seconds_of

from rowdit.flow.path import flow_loss

WORKER = "ROWMUON_OVERLAP_STEP_WORKER"
NUMBERS = ("ranks", "hidden", "depth", "batch", "rounds", "steps", "bucket_kib")


class Timed(Contender):
    """As `train_step.Contender`, with a stop-watch for ``step()``."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        what, _, overlap = name.partition(", ")
        self.settings = {"bucket_bytes": options.bucket_kib << 10, "overlap": overlap or None}
        super().__init__(what, options)
        self.num_steps = options.steps
        self.in_step_seconds = 0.0

    def train(self) -> None:
        self.in_step_seconds = 0.0
        for _ in range(self.num_steps):
            self.model.zero_grad()
            flow_loss(self.model, self.images, self.labels, self.noise, self.times).mean().backward()
            start = time.perf_counter()
            self.optimizers[0].step()
            self.in_step_seconds += time.perf_counter() - start


def names(options: argparse.Namespace) -> list[str]:
    return [f"{refresh} K=1{overlap}" for refresh in options.refresh for overlap in ("", ", backward")]


def work(options: argparse.Namespace) -> None:
    """One rank."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    contenders = {name: Timed(name, options) for name in names(options)}
    for contender in contenders.values():
        contender.train()
    seconds: dict[str, dict[str, list[float]]] = {name: {"whole": [], "step": []} for name in contenders}
    for index in range(options.rounds):
        for name in list(contenders) if index % 2 == 0 else list(reversed(contenders)):
            seconds[name]["whole"].append(seconds_of(contenders[name].train) / options.steps)
            seconds[name]["step"].append(contenders[name].in_step_seconds / options.steps)
        if dist.get_rank() == 0:
            print(f"round {index + 1} of {options.rounds}", flush=True)
    counts = {}
    for name, contender in contenders.items():
        plan = contender.optimizers[0].plan("refresh")  # type: ignore[attr-defined]
        counts[name] = [len(plan.ahead), len(plan.buckets)]
    report({"seconds": seconds, "buckets": counts})
    dist.barrier()
    dist.destroy_process_group()


def summarize(ranks: Sequence[dict]) -> dict[str, dict[str, object]]:
    """By contender, of the slowest rank of each round; ``less`` are the seconds saved within a round, medians."""
    slowest = {
        name: {
            kind: [max(values) for values in zip(*(rank["seconds"][name][kind] for rank in ranks), strict=True)]
            for kind in ("whole", "step")
        }
        for name in ranks[0]["seconds"]
    }
    found: dict[str, dict[str, object]] = {}
    for name, own in slowest.items():
        base = slowest[name.removesuffix(", backward")]
        less = {kind: statistics.median(b - o for o, b in zip(own[kind], base[kind], strict=True)) for kind in own}
        ratio = statistics.median(1 - o / b for o, b in zip(own["whole"], base["whole"], strict=True))
        found[name] = {
            "whole": asdict(Spread.of(own["whole"])),
            "step": asdict(Spread.of(own["step"])),
            "less": less,
            "less_of_whole": ratio,
            "buckets": ranks[0]["buckets"][name],
        }
    return found


def page(options: argparse.Namespace, found: dict[str, dict], network: str) -> str:
    rows = [
        [
            name,
            "{} of {}".format(*values["buckets"]),
            Spread(**values["whole"]).show(1e3),
            Spread(**values["step"]).show(1e3),
            f"{1e3 * values['less']['whole']:.0f}" if name.endswith("backward") else "",
            f"{1e3 * values['less']['step']:.0f}" if name.endswith("backward") else "",
            f"{100 * values['less_of_whole']:.1f} %" if name.endswith("backward") else "",
        ]
        for name, values in found.items()
    ]
    headers = [
        "method",
        "buckets ahead",
        "training step ms",
        "in step() ms",
        "step less, ms",
        "step() less, ms",
        "less",
    ]
    return "\n\n".join(
        [
            "# A refresh that starts during backward",
            f"`{command_line()}`",
            f"{machine_line(machine())}. {network}; one thread a rank, so only ratios mean something. {options.depth} "
            f"DiT blocks of width {options.hidden} under FSDP2, {options.batch} images of 64 tokens a rank, buckets of "
            f"{options.bucket_kib} KiB. Median [quartiles] of {options.rounds} rounds of {options.steps} steps, the "
            "slowest rank's; differences are taken within a round.",
            table(headers, rows),
        ]
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s a link (default 200)")
    parser.add_argument("--hidden", type=int, default=256, help="width, a multiple of 64 (default 256)")
    parser.add_argument("--depth", type=int, default=4, help="blocks (default 4)")
    parser.add_argument("--batch", type=int, default=16, help="images a rank (default 16)")
    parser.add_argument("--bucket-kib", type=int, default=256, help="bucket_bytes (default 256 KiB)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1, help="of a round (default 1)")
    parser.add_argument("--refresh", nargs="+", choices=("exchange", "gather"), default=["exchange", "gather"])
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds (default 900)")
    parser.add_argument(
        "--save", nargs="?", const="overlap_step", metavar="NAME", help=f"write {RESULTS.name}/NAME.json and NAME.md"
    )
    options = parser.parse_args(argv)
    for name in NUMBERS:
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; give at least 1")
    if options.hidden % 64:
        parser.error(f"--hidden is {options.hidden}; give a multiple of 64, the width of a head")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    if os.environ.get(WORKER):
        work(options)
        return
    source = str(Path(__file__).resolve().parents[1] / "src")
    path = os.pathsep.join(part for part in (source, os.environ.get("PYTHONPATH", "")) if part)
    arguments = ["--refresh", *options.refresh]
    for name in NUMBERS:
        arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    with Cluster(options.ranks, options.rate, timeout_s=options.timeout) as cluster:
        ranks = cluster.run(__file__, arguments, env={WORKER: "1", "PYTHONPATH": path})
        network = cluster.network
    found = summarize(ranks)
    text = page(options, found, network.describe())
    print(f"\n{text}")
    if options.save:
        settings = {key: value for key, value in vars(options).items() if key != "save"}
        data = {"command": command_line(), "machine": machine(), "network": asdict(network), "settings": settings}
        write_results(RESULTS / options.save, {**data, "methods": found}, text)


if __name__ == "__main__":
    main()
