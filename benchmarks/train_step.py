"""Whole training steps of a small DiT under FSDP2 on an emulated cluster: what a faster optimizer is worth end to end.

    python benchmarks/train_step.py                      # 4 ranks at 200 Mbit/s
    python benchmarks/train_step.py --batch 64           # a smaller share for the optimizer, so a smaller gain

Each contender trains its own copy of the model: forward, backward and step, all of it under FSDP2 with its own traffic.
The gain is bounded by the optimizer's share of the step, so the share is printed, and the reduction is held against the
one that the share predicts: the optimizers' steps are timed once more by themselves, and

    predicted = (vanilla's optimizer time - this optimizer's time) / vanilla's step time.

The ranks are started by ``cluster.py``; the baseline ``vanilla`` is ``vanilla.py`` with AdamW for the other parameters.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster import Cluster, report
from reporting import RESULTS, Spread, command_line, machine, machine_line, table, write_results
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from vanilla import VanillaMuon

import rowmuon
from rowdit.flow.path import flow_loss
from rowdit.models.dit import DiT, DiTConfig

METHODS = ("vanilla", "gather K=3", "exchange K=1", "exchange K=3")
WORKER = "ROWMUON_TRAIN_STEP_WORKER"
STEPS = 3  # a whole period for every contender
TOLERANCE = 0.05  # between predicted and measured reduction, as parts of the step


class Contender:
    """A model under FSDP2 and its optimizer(s); ``train`` and ``optimize`` take a whole period."""

    settings: Mapping[str, Any] = {}  # of `rowmuon.PeriodicRowMuon`, beside what the name says

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = DiT(
            DiTConfig(16, 4, 2, options.hidden, options.depth, num_heads=options.hidden // 64, num_classes=10), seed=0
        )
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizers = self._optimizers(name)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.images, self.noise = torch.randn(2, options.batch, 4, 16, 16, generator=generator)
        self.times = torch.rand(options.batch, generator=generator)
        self.labels = torch.randint(10, (options.batch,), generator=generator)

    def _optimizers(self, name: str) -> list[torch.optim.Optimizer]:
        muon = {"lr": 1e-3, "weight_decay": 0.01}
        adamw = {"lr": 1e-4, "weight_decay": 0.01, "betas": (0.9, 0.95)}
        groups = rowmuon.param_groups(self.model, rowmuon.rules.DIT, muon=muon, adamw=adamw)
        if name != "vanilla":
            refresh, period = name.split(" K=")
            settings = {"adjust_lr_fn": "match_rms_adamw", "period": int(period), "refresh": refresh, **self.settings}
            return [rowmuon.PeriodicRowMuon(groups, lr=1e-3, **settings)]
        matrices = [
            {"params": group["params"], "chunks": group.get("chunks", 1)}
            for group in groups
            if group["algorithm"] == "muon"
        ]
        others = [{"params": group["params"]} for group in groups if group["algorithm"] == "adamw"]
        return [VanillaMuon(matrices, **muon), torch.optim.AdamW(others, fused=True, **adamw)]

    def train(self) -> None:
        for _ in range(STEPS):
            self.model.zero_grad()
            flow_loss(self.model, self.images, self.labels, self.noise, self.times).mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()

    def optimize(self) -> None:
        """The optimizer alone, on the gradients that the last training step left."""
        for _ in range(STEPS):
            for optimizer in self.optimizers:
                optimizer.step()


def seconds_of(action: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def work(options: argparse.Namespace) -> None:
    """One rank."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    contenders = {name: Contender(name, options) for name in options.methods}
    for contender in contenders.values():
        contender.train()
    seconds: dict[str, dict[str, list[float]]] = {name: {"train": [], "optimize": []} for name in contenders}
    for index in range(options.rounds):
        order = list(contenders) if index % 2 == 0 else list(reversed(contenders))
        for name in order:
            seconds[name]["train"].append(seconds_of(contenders[name].train) / STEPS)
            seconds[name]["optimize"].append(seconds_of(contenders[name].optimize) / STEPS)
        if dist.get_rank() == 0:
            print(f"round {index + 1} of {options.rounds}", flush=True)
    model = contenders[options.methods[0]].model
    report({"seconds": seconds, "num_parameters": sum(parameter.numel() for parameter in model.parameters())})
    dist.barrier()
    dist.destroy_process_group()


def summarize(ranks: Sequence[dict]) -> dict[str, dict[str, object]]:
    """By contender: step and optimizer seconds, the optimizer's share, measured and predicted reduction."""
    names = list(ranks[0]["seconds"])
    slowest = {
        name: {
            kind: [max(values) for values in zip(*(rank["seconds"][name][kind] for rank in ranks), strict=True)]
            for kind in ("train", "optimize")
        }
        for name in names
    }
    base = slowest[names[0]]
    found = {}
    for name in names:
        train, optimize = slowest[name]["train"], slowest[name]["optimize"]
        # Within each round, so that a machine that slows down in between doesn't enter.
        per_round = zip(train, optimize, base["train"], base["optimize"], strict=True)
        ratios = [(1 - t / base_t, (base_o - o) / base_t) for t, o, base_t, base_o in per_round]
        found[name] = {
            "step": asdict(Spread.of(train)),
            "optimizer": asdict(Spread.of(optimize)),
            "share": statistics.median(o / t for o, t in zip(optimize, train, strict=True)),
            "less": statistics.median(measured for measured, _ in ratios),
            "predicted": statistics.median(predicted for _, predicted in ratios),
        }
    return found


def page(options: argparse.Namespace, found: dict[str, dict], network: str, num_parameters: int) -> str:
    base = found[options.methods[0]]
    rows = [
        [
            name,
            Spread(**values["step"]).show(1e3),
            Spread(**values["optimizer"]).show(1e3),
            f"{100 * values['share']:.1f} %",
            f"{100 * values['less']:.1f} %",
            f"{100 * values['predicted']:.1f} %",
            "" if values is base else "yes" if abs(values["less"] - values["predicted"]) <= TOLERANCE else "**no**",
        ]
        for name, values in found.items()
    ]
    headers = ["method", "step ms", "optimizer ms", "share", "step time less", "predicted", "agree"]
    return "\n\n".join(
        [
            "# Training step under FSDP2",
            f"`{command_line()}`",
            f"{machine_line(machine())}. {network}; one thread a rank, so only ratios mean something. A DiT of "
            f"{num_parameters / 1e6:.2f} M parameters ({options.depth} blocks of width {options.hidden}), 64 tokens an "
            f"image, {options.batch} images a rank. With `{options.methods[0]}` the optimizer takes "
            f"{100 * base['share']:.1f} % of the step. Median [quartiles] of {options.rounds} rounds of {STEPS} steps.",
            table(headers, rows),
            "`share`: the optimizer's part of that method's own step. `predicted`: from the optimizers' times measured "
            f"alone. `agree`: within {100 * TOLERANCE:.0f} % of a step.",
        ]
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s a link (default 200)")
    parser.add_argument("--hidden", type=int, default=256, help="width, a multiple of 64 (default 256)")
    parser.add_argument("--depth", type=int, default=4, help="blocks (default 4)")
    parser.add_argument("--batch", type=int, default=16, help="images a rank (default 16)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="the first is the baseline"
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds (default 3600)")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/train_step.json and .md")
    options = parser.parse_args(argv)
    for name in ("ranks", "hidden", "depth", "batch", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; give at least 1")
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
    arguments = ["--methods", *options.methods]
    for name in ("hidden", "depth", "batch", "rounds"):
        arguments += [f"--{name}", str(getattr(options, name))]
    with Cluster(options.ranks, options.rate, timeout_s=options.timeout) as cluster:
        ranks = cluster.run(__file__, arguments, env={WORKER: "1", "PYTHONPATH": path})
        network = cluster.network
    found = summarize(ranks)
    text = page(options, found, network.describe(), ranks[0]["num_parameters"])
    print(f"\n{text}")
    if options.save:
        settings = {key: value for key, value in vars(options).items() if key != "save"}
        data = {"command": command_line(), "machine": machine(), "network": asdict(network), "settings": settings}
        write_results(RESULTS / "train_step", {**data, "methods": found}, text)


if __name__ == "__main__":
    main()
