"""The machine that numbers come from: its name, and its best rate of matrix products."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Product", "best_product", "machine", "machine_line", "matmul_rate", "synchronize"]


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


@dataclass(frozen=True)
class Product:
    """out = a b, (m, k) by (k, n)."""

    a: Tensor
    b: Tensor
    out: Tensor

    @property
    def num_flops(self) -> int:
        return 2 * self.a.shape[0] * self.a.shape[1] * self.b.shape[1]

    def seconds(self, num_flops: float) -> float:
        """Time that `num_flops` take, one product after another; scaled from a whole number of them."""
        repeats = max(1, round(num_flops / self.num_flops))
        synchronize(self.a.device.type)
        start = time.perf_counter()
        for _ in range(repeats):
            torch.mm(self.a, self.b, out=self.out)
        synchronize(self.a.device.type)
        return (time.perf_counter() - start) * num_flops / (repeats * self.num_flops)


def best_product(hidden: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Product:
    """The fastest of the products that orthogonalising a DiT block's matrices consists of.

    These are h x h by h x h and, for an MLP weight, h x h by h x 4h and h x 4h by its transpose.
    """
    square = torch.randn(hidden, hidden, device=device).to(dtype)
    wide = torch.randn(hidden, 4 * hidden, device=device).to(dtype)
    products = [
        Product(a, b, a.new_empty(a.shape[0], b.shape[1]))
        for a, b in ((square, square), (square, wide), (wide, wide.mT))
    ]
    # A few milliseconds each, so that the clock's grain doesn't show; the first time warms up.
    num_flops = max(4 * products[-1].num_flops, 1e9)
    seconds = [[product.seconds(num_flops) for product in products] for _ in range(6)][1:]
    medians = [statistics.median(times) for times in zip(*seconds, strict=True)]
    return products[medians.index(min(medians))]


def matmul_rate(hidden: int, device: str) -> float:
    """FLOP/s of `best_product`."""
    product = best_product(hidden, device)
    num_flops = max(8 * product.num_flops, 1e9)
    return num_flops / statistics.median(product.seconds(num_flops) for _ in range(5))
