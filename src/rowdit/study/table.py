"""The comparison as tables in the terminal. They fit 80 columns, for terminals and logs alike."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def print_table(summary: dict[str, Any], console: Console) -> None:
    """Prints the four numbers and the gain over AdamW, then what a step costs; a row an optimizer."""
    num_seeds = len(summary["seeds"])
    title = f"{summary['recipe']}: {summary['score_name']}, lower is better"
    if num_seeds > 1:
        title += f", mean of {num_seeds} seeds"
    scores = new_table(title, "lr", "best", "step", "vs adamw", "half", "time", "final", "val loss")
    costs = new_table("what a step costs", "ms", "optimizer ms", "refresh", "row", "share", "to adamw's best")
    for label, entry in summary["optimizers"].items():
        gain = entry.get("gain_over_adamw", {}).get("best")
        scores.add_row(
            label,
            f"{entry['lr']:g}",
            _number(entry["best"]["score"]),
            _number(entry["best"]["step"], ".0f"),
            "-" if gain is None or label == "adamw" else f"{-100 * gain:+.1f}%",
            _number(entry["at_fixed_step"]["score"]),
            _number(entry["at_fixed_time"]["score"]),
            _number(entry["final"]["score"]),
            _number(entry["val_loss"]["final"]["score"], ".4f"),
        )
        cost = entry["optimizer_seconds_per_step"]
        costs.add_row(
            label,
            _milliseconds(entry["step_seconds"]),
            *(_milliseconds(cost[kind]) for kind in ("mean", "refresh", "row")),
            "-" if entry["optimizer_share"] is None else f"{100 * entry['optimizer_share']:.1f}%",
            "-" if entry["time_to_adamw_best"] is None else f"{entry['time_to_adamw_best']:.0f} s",
        )
    console.print(scores)
    console.print(
        f"Real images score {summary['floor']:.1f}. best: the step is chosen on one set of samples and scored on "
        "another. half: at half of the steps. time: when the fastest optimizer was done.",
        highlight=False,
    )
    for warning in {entry["caution"] for entry in summary["optimizers"].values() if "caution" in entry}:
        console.print(f"Caution: {warning}.", highlight=False)
    console.print(costs)
    for label, entry in summary["optimizers"].items():
        for seed, reason in entry["diverged"].items():
            console.print(f"{label}, seed {seed}: {reason}", highlight=False)


def new_table(title: str, *columns: str, first: str = "optimizer", wrap: bool = False) -> Table:
    """A table whose first column is text and whose others are numbers; with `wrap` narrow terminals break its cells."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=not wrap)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=not wrap)
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def _number(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)
