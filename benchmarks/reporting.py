"""What the benchmark scripts share: a DiT block's matrices, medians with their spread, tables, result files."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent / "results"
HIDDEN_SIZES = {"S": 384, "B": 768, "L": 1024, "XL": 1152}


@dataclass(frozen=True)
class Matrix:
    """A weight of a DiT block, (out features, in features), and how many matrices are fused along its rows."""

    name: str
    num_rows: int
    num_cols: int
    chunks: int = 1


def dit_matrices(hidden: int, depth: int, *, chunked: bool = False, adaln: bool = True) -> list[Matrix]:
    """The Muon matrices of ``depth`` DiT blocks of width ``hidden`` (MLP ratio 4): 18 hidden^2 parameters a block.

    ``adaln=False`` leaves out the modulation (12 hidden^2), as where AdamW takes it.
    """
    block = [
        Matrix("adaLN", 6 * hidden, hidden, 6 if chunked else 1),
        Matrix("qkv", 3 * hidden, hidden, 3 if chunked else 1),
        Matrix("out", hidden, hidden),
        Matrix("fc1", 4 * hidden, hidden),
        Matrix("fc2", hidden, 4 * hidden),
    ]
    block = block if adaln else block[1:]
    return [Matrix(f"blocks.{i}.{m.name}", m.num_rows, m.num_cols, m.chunks) for i in range(depth) for m in block]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements."""

    median: float
    lower: float  # first quartile
    upper: float  # third quartile
    num: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = sorted(values)
        if not values:
            raise ValueError("a spread needs at least one value")
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper, len(values))

    def show(self, scale: float = 1.0, digits: int = 3) -> str:
        """``median [lower, upper]`` to ``digits`` significant digits."""
        return f"{_digits(self.median * scale, digits)} [{_digits(self.lower * scale, digits)}, " + (
            f"{_digits(self.upper * scale, digits)}]"
        )


def _digits(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    decimals = max(digits - 1 - int(f"{abs(value):e}".partition("e")[2]), 0)
    return f"{value:.{decimals}f}"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, its columns padded so that it also reads as plain text."""
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def machine(device: str = "cpu") -> dict[str, object]:
    """What the numbers were measured on."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        models = [
            line.partition(":")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
        ]
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


def command_line() -> str:
    """The command that made the result, with the script's path relative to the repository."""
    script = Path(sys.argv[0]).resolve()
    root = RESULTS.parent.parent
    shown = script.relative_to(root) if script.is_relative_to(root) else Path(script.name)
    return shlex.join(["python", str(shown), *sys.argv[1:]])


def write_results(stem: Path, data: Mapping[str, object], markdown: str) -> None:
    """Writes ``stem``.json and ``stem``.md."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    stem.with_suffix(".md").write_text(markdown.rstrip() + "\n")
    print(f"wrote {stem.with_suffix('.json')} and .md")
