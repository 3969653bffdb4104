"""The machine that numbers come from: its name, and its best rate of matrix products."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["machine", "machine_line", "matmul_rate", "synchronize"]


def machine(device: str = "cpu") -> dict[str, object]:
    """What the numbers were measured on."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2] for line in lines if "model name" in line]
        name = models[0].strip() if models else name
    return {
        "cpu": name,
        "num_cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
    }


def machine_line(facts: Mapping[str, object]) -> str:
    device = "" if facts["device"] == "cpu" else f"{facts['device']}, "
    return f"{device}{facts['cpu']}, {facts['num_cores']} cores, torch {facts['torch']}, Python {facts['python']}"


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def matmul_rate(hidden: int, device: str, dtype: torch.dtype = torch.bfloat16, num_rounds: int = 5) -> float:
    """FLOP/s of the best of the products that orthogonalising a DiT block's matrices consists of.

    These are h x h by h x h and, for an MLP weight, h x h by h x 4h and h x 4h by its transpose.
    """
    square = torch.randn(hidden, hidden, device=device).to(dtype)
    wide = torch.randn(hidden, 4 * hidden, device=device).to(dtype)
    products: list[tuple[Tensor, Tensor]] = [(square, square), (square, wide), (wide, wide.mT)]
    outs = [a.new_empty(a.shape[0], b.shape[1]) for a, b in products]

    def rate(a: Tensor, b: Tensor, out: Tensor) -> float:
        def multiply() -> None:
            torch.mm(a, b, out=out)

        num_flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
        repeats = max(1, int(2e-3 * 1e11 / num_flops))  # of milliseconds, so that the clock's grain doesn't show
        return repeats * num_flops / _median_seconds(multiply, repeats, num_rounds, device)

    return max(rate(a, b, out) for (a, b), out in zip(products, outs, strict=True))


def _median_seconds(action: Callable[[], None], repeats: int, num_rounds: int, device: str) -> float:
    seconds = []
    for index in range(num_rounds + 1):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            action()
        synchronize(device)
        if index > 0:  # the first one warms up
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
