"""The comparison as a table in the terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def print_table(summary: dict[str, Any], console: Console) -> None:
    """Prints the four numbers, the gain over AdamW, and what a step costs, a row an optimizer."""
    num_seeds = len(summary["seeds"])
    title = f"{summary['recipe']}: {summary['score_name']}, lower is better"
    if num_seeds > 1:
        title += f", mean of {num_seeds} seeds"
    # It fits 80 columns, for terminals and logs alike.
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("optimizer", no_wrap=True)
    for name in ("lr", "best", "step", "vs adamw", "half", "time", "final", "val loss", "ms", "opt %"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, entry in summary["optimizers"].items():
        gain = entry.get("gain_over_adamw", {}).get("best")
        share = entry["optimizer_share"]
        table.add_row(
            label,
            f"{entry['lr']:g}",
            _number(entry["best"]["score"]),
            _number(entry["best"]["step"], ".0f"),
            "-" if gain is None or label == "adamw" else f"{-100 * gain:+.1f}%",
            _number(entry["at_fixed_step"]["score"]),
            _number(entry["at_fixed_time"]["score"]),
            _number(entry["final"]["score"]),
            _number(entry["val_loss"]["final"]["score"], ".4f"),
            _number(None if entry["step_seconds"] is None else 1000 * entry["step_seconds"], ".0f"),
            "-" if share is None else f"{100 * share:.1f}",
        )
    console.print(table)
    console.print(
        f"Real images against real ones: {summary['floor']:.1f}. best: step chosen on one set of samples, scored on "
        "another; half: at half of the steps; time: when the fastest was done; ms: a step; opt %: of it the optimizer.",
        highlight=False,
    )
    for label, entry in summary["optimizers"].items():
        for seed, reason in entry["diverged"].items():
            console.print(f"{label}, seed {seed}: {reason}", highlight=False)


def _number(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)
