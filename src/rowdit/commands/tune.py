"""`rowdit tune`: a grid of settings for one optimizer."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from rowdit.commands.limits import check_processes
from rowdit.commands.outputs import check_folder, no_empty_folder
from rowdit.commands.parsing import fail, items_of, parse_with_recipe, with_steps


@dataclass(frozen=True)
class TuneOptions:
    """Runs a grid of settings for one optimizer, each on one thread, several side by side. Ctrl-C saves; the same
    command goes on.

    Args:
        optimizer: which of the recipe's.
        lr: learning rates, comma-separated.
        row_scale: values of row_scale, comma-separated; periodic only.
        grid: more axes, KEY=VALUE,VALUE: betas=[0.9,0.95],[0.9,0.99] adaln=muon,adamw train.ema_decay=0.99,0.995
        seeds: comma-separated.
        steps: of each run; the recipe's by default.
        out: folder for the results; by default out/tune-RECIPE.
        processes: runs at a time.
        show: only print what was found so far.
    """

    optimizer: str = "adamw"
    lr: str | None = None
    row_scale: str | None = None
    grid: tuple[str, ...] = ()
    seeds: str = "0"
    steps: int | None = None
    out: Path | None = None
    processes: int = 2
    show: bool = False


def run(arguments: list[str]) -> int:
    options, comparison, recipe = parse_with_recipe("tune", TuneOptions, arguments)
    from rowdit.study.sweep import make_tasks, parse_grid, parse_seeds, print_sweep, sweep

    comparison = with_steps(comparison, options.steps)
    out = options.out or Path("out") / f"tune-{recipe}"
    check_folder(out)
    check_processes("processes", options.processes)
    axes = (("lr", options.lr), ("row_scale", options.row_scale))
    given = {key: items_of(f"--{key.replace('_', '-')}", text) for key, text in axes if text is not None}
    entries = [f"{key}={','.join(items)}" for key, items in given.items()]
    items_of("--seeds", options.seeds)
    if not options.show:
        tasks = make_tasks(
            comparison, options.optimizer, parse_grid([*entries, *options.grid]), parse_seeds(options.seeds)
        )
        with no_empty_folder(out):
            is_complete = sweep(tasks, out, num_processes=options.processes)
        if not is_complete:
            again = shlex.join(["rowdit", "tune", *arguments])
            return fail(f"stopped; everything is saved. To go on: {again}", 130)
    print_sweep(out)
    return 0
