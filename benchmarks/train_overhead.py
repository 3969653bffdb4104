"""What the trainer costs beside the model and the optimizer: `rowdit train`'s loop against a bare one.

Both have the same model, optimizer, batch size and average. The bare loop is what one writes first: images in memory,
an index, `torch.randn` and `torch.rand`, the loss, `backward`, torch's clipping, `step`, a lerp of the average. The
trainer's has in addition: random numbers by (seed, position), the loader, the finite check, phase timing, the logs and
the progress line. Evaluations and checkpoints are left out of both. Segments of the two alternate, so that what else
the machine does hits both; the figure is the median over pairs of neighbouring segments. Times are the processor's, of
this process on one thread, so that other programs' turns don't count.

    python benchmarks/train_overhead.py --save

Target: the trainer's step takes at most 3 % longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reporting import RESULTS, Spread, command_line, machine, machine_line, table, write_results

from rowdit import recipes
from rowdit.data import open_dataset, to_float
from rowdit.flow import flow_loss
from rowdit.models.dit import DiT
from rowdit.study.comparison import Comparison
from rowdit.train.config import RunConfig
from rowdit.train.loop import train
from rowdit.train.optimizers import build_optimizer
from rowdit.train.progress import RunProgress

TARGET = 0.03


class Clock(RunProgress):
    """The screen of `rowdit train`, and the time of each step as it ends. Gives the bare loop its turns."""

    def __init__(self, steps: int, segment: int, other: Iterator[None], own: list[float]) -> None:
        super().__init__("run", steps, 0)
        self.segment, self.other, self.own = segment, other, own
        self.last = time.process_time()
        self.in_segment: list[float] = []

    def step(self, step: int, loss: float, num_images: int) -> None:
        super().step(step, loss, num_images)
        now = time.process_time()
        self.in_segment.append(now - self.last)
        if len(self.in_segment) == self.segment:
            self.own.append(sum(self.in_segment) / self.segment)
            self.in_segment.clear()
            next(self.other)
        self.last = time.process_time()


def bare_loop(config: RunConfig, dataset: Any, segment: int, seconds: list[float]) -> Iterator[None]:
    """Trains; hands over after every `segment` steps."""
    model = DiT(config.model)
    optimizer = build_optimizer(model, config.optimizer)
    average = [p.detach().clone() for p in model.parameters()]
    images, labels = dataset.fetch(np.arange(len(dataset)))
    x_all, y_all = to_float(images), torch.from_numpy(labels)
    size = config.train.batch_size
    while True:
        start = time.process_time()
        for _ in range(segment):
            index = torch.randint(len(x_all), (size,))
            x, y, noise, t = x_all[index], y_all[index], torch.randn(size, *x_all.shape[1:]), torch.rand(size)
            y = torch.where(torch.rand(size) < config.train.class_dropout, config.model.num_classes, y)
            optimizer.zero_grad()
            loss = flow_loss(model, x, y, noise, t).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(average, list(model.parameters()), 1 - config.train.ema_decay)
            loss.item()
        seconds.append((time.process_time() - start) / segment)
        yield


@contextmanager
def run_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "run"


def measure(optimizer: str, segments: int, segment: int, batch_size: int) -> dict[str, Any]:
    comparison = recipes.load("quickstart")
    assert isinstance(comparison, Comparison)
    config = comparison.run_config(optimizer, 0)
    steps = segments * segment
    changed = dataclasses.replace(config.train, steps=steps, checkpoint_every=10 * steps, batch_size=batch_size)
    config = dataclasses.replace(config, train=changed)
    dataset = open_dataset(config.data.source, "train", config.model.image_size)
    bare: list[float] = []
    own: list[float] = []
    other = bare_loop(config, dataset, segment, bare)
    next(other)  # warm
    with run_folder() as folder, Clock(steps, segment, other, own) as clock:
        train(config, dataset, folder, progress=clock, loggers=[clock])
    # The first segment of each has the first touches of memory. The bare one's i-th runs after the trainer's i-th.
    pairs = list(zip(own[1:], bare[2:], strict=True))
    return {
        "optimizer": optimizer,
        "trainer_seconds": [a for a, _ in pairs],
        "bare_seconds": [b for _, b in pairs],
        "overhead": [a / b - 1 for a, b in pairs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, default=15, help="pairs of segments")
    parser.add_argument("--segment", type=int, default=12, help="steps in a segment; a multiple of the period")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--optimizers", nargs="*", default=["adamw", "periodic"])
    parser.add_argument("--save", action="store_true", help=f"write into {RESULTS.name}/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(o, options.segments, options.segment, options.batch_size) for o in options.optimizers]
    rows = []
    for result in results:
        own, bare = (Spread.of(result[f"{name}_seconds"]) for name in ("trainer", "bare"))
        overhead = Spread.of(result["overhead"])
        verdict = "reached" if overhead.median <= TARGET else "missed"
        rows.append(
            [
                result["optimizer"],
                f"{1e3 * own.median:.1f}",
                f"{1e3 * bare.median:.1f}",
                f"{overhead.median:+.1%} ({overhead.lower:+.1%} to {overhead.upper:+.1%})",
                verdict,
            ]
        )
    header = [
        "optimizer",
        "trainer, CPU ms a step",
        "bare loop, CPU ms",
        "overhead (quartiles)",
        f"target {TARGET:.0%}",
    ]
    page = "\n".join(
        [
            "# The trainer's overhead",
            "",
            f"    {command_line()}",
            "",
            machine_line(machine()),
            "",
            f"The model of `quickstart`, batch {options.batch_size}; {options.segments - 1} pairs of segments of "
            f"{options.segment} steps.",
            "",
            table(header, rows),
        ]
    )
    print(page)
    if options.save:
        data = {"command": command_line(), "machine": machine(), "results": results}
        write_results(RESULTS / "train_overhead", data, page)


if __name__ == "__main__":
    main()
