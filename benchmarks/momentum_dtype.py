"""Does momentum in bf16 harm? Small Diffusion Transformers trained with each way of keeping it, seed by seed.

    python benchmarks/momentum_dtype.py --save

The ways share initial weights, data order, noise and times; what differs is how the momentum is kept:

* fp32;
* bf16: `state_dtype=torch.bfloat16`, rounded to the nearest, as the optimizer does it;
* stochastic: rounded to bf16 after each step, up or down at random, so that it is right on average;
* fp32, other noise: fp32 with other times and noise from the first step on, as a measure of what chance does.

Reported is the loss on held-out images at fixed times and noise, each way's difference to fp32 of the same seed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from reporting import RESULTS, command_line, machine, machine_line, write_results
from torch import Tensor
from torch.nn.functional import avg_pool2d

import rowmuon
from rowdit.data import open_dataset
from rowdit.flow import flow_loss
from rowdit.models.dit import DiT, DiTConfig

WAYS = ("fp32", "bf16", "stochastic", "fp32, other noise")
MODEL = DiTConfig(image_size=14, in_channels=1, patch_size=2, hidden_size=64, depth=2, num_heads=2, num_classes=10)
BATCH_SIZE, WARMUP = 64, 20


@dataclass(frozen=True)
class Result:
    """One run: loss on held-out images after the last step."""

    way: str
    period: int
    seed: int
    loss: float


def images(split: str, most: int) -> tuple[Tensor, Tensor]:
    """(N, 1, 14, 14) in [-1, 1] and (N,) classes."""
    dataset = open_dataset("bundled", split, 28)  # type: ignore[arg-type]
    batch, labels = dataset.fetch(np.arange(min(most, len(dataset))))
    x = torch.from_numpy(np.asarray(batch)).float()
    return avg_pool2d(x / 127.5 - 1, 2), torch.from_numpy(np.asarray(labels)).long()


def round_stochastically_(tensor: Tensor, generator: torch.Generator) -> None:
    """To bf16 values, in place: away from zero with the probability that makes the mean right."""
    bits = tensor.view(torch.int32)
    bits += torch.randint(0, 1 << 16, bits.shape, generator=generator, dtype=torch.int32)
    bits &= -(1 << 16)


def draws(seed: int, way: str, num_images: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(indices, noise, times) of each step. Only the last way has other noise."""
    order = torch.Generator().manual_seed(1000 + seed)
    noise = torch.Generator().manual_seed(2000 + seed + 500 * (way == WAYS[-1]))
    while True:
        index = torch.randint(0, num_images, (BATCH_SIZE,), generator=order)
        yield index, torch.randn(BATCH_SIZE, 1, 14, 14, generator=noise), torch.rand(BATCH_SIZE, generator=noise)


def train(way: str, period: int, seed: int, num_steps: int, lr: float, row_scale: float) -> Result:
    (x, y), (held_x, held_y) = images("train", 12_000), images("reference", 1000)
    torch.manual_seed(seed)
    model = DiT(MODEL)
    groups = rowmuon.param_groups(model, rowmuon.rules.DIT, muon={"lr": lr}, adamw={"lr": 3e-3, "weight_decay": 0.0})
    state_dtype = torch.bfloat16 if way == "bf16" else None
    optimizer = rowmuon.PeriodicRowMuon(
        groups,
        adjust_lr_fn="match_rms_adamw",
        weight_decay=0.0,
        period=period,
        row_scale=row_scale,
        state_dtype=state_dtype,
    )
    base = [group["lr"] for group in optimizer.param_groups]
    rounding = torch.Generator().manual_seed(3000 + seed)
    for step, (index, noise, t) in zip(range(num_steps), draws(seed, way, len(x)), strict=False):
        for group, value in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = value * min(1.0, (step + 1) / WARMUP)
        optimizer.zero_grad()
        flow_loss(model, x[index], y[index], noise, t).mean().backward()
        optimizer.step()
        if way == "stochastic":
            for state in optimizer.state.values():
                if "momentum_buffer" in state:
                    round_stochastically_(state["momentum_buffer"], rounding)
    fixed = torch.Generator().manual_seed(7)
    noise = torch.randn(held_x.shape, generator=fixed)
    t = (torch.arange(len(held_x)) + 0.5) / len(held_x)
    with torch.no_grad():
        return Result(way, period, seed, float(flow_loss(model, held_x, held_y, noise, t).mean()))


def report(results: Sequence[Result]) -> str:
    """Markdown: for each period and way the mean loss, and the paired difference to fp32 with its standard error."""
    lines = [
        "| K | momentum | loss, mean | minus fp32's, mean over seeds | its standard error |",
        "|---:|---|---:|---:|---:|",
    ]
    for period in sorted({result.period for result in results}):
        of_way = {w: {r.seed: r.loss for r in results if (r.way, r.period) == (w, period)} for w in WAYS}
        for way, losses in of_way.items():
            differences = [loss - of_way["fp32"][seed] for seed, loss in losses.items()]
            error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
            shown = "" if way == "fp32" else f"{statistics.mean(differences):+.5f}"
            lines.append(
                f"| {period} | {way} | {statistics.mean(losses.values()):.5f} | {shown} | "
                f"{'' if way == 'fp32' else f'{error:.5f}'} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--periods", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--lr", type=float, default=1.6e-2)
    parser.add_argument("--row-scale", type=float, default=0.25)
    parser.add_argument("--save", action="store_true", help="write results/momentum_dtype.json and .md")
    options = parser.parse_args()
    results, started = [], time.monotonic()
    for seed in range(options.seeds):
        for period in options.periods:
            for way in WAYS:
                results.append(train(way, period, seed, options.steps, options.lr, options.row_scale))
                print(results[-1], f"{time.monotonic() - started:.0f} s", flush=True)
    num_parameters = sum(p.numel() for p in DiT(MODEL).parameters() if p.requires_grad)
    text = (
        f"# Momentum in bf16\n\n`{command_line()}`, {machine_line(machine())}\n\nA Diffusion Transformer of "
        f"{num_parameters:,} parameters on 14 x 14 Fashion-MNIST, {options.steps} steps of {BATCH_SIZE} images, "
        f"lr {options.lr:g}, row_scale {options.row_scale:g}, {options.seeds} seeds.\n\n{report(results)}"
    )
    print(text)
    if options.save:
        data = {"command": command_line(), "machine": machine(), "results": [asdict(result) for result in results]}
        write_results(RESULTS / "momentum_dtype", data, text)


if __name__ == "__main__":
    main()
