"""`rowdit compare`: the same model with each optimizer, one after another."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from rowdit.commands.outputs import check_folder, no_empty_folder
from rowdit.commands.parsing import fail, items_of, parse_with_recipe, set_threads, with_steps


@dataclass(frozen=True)
class CompareOptions:
    """Trains the same model from the same start with each optimizer, one after another. Ctrl-C saves; the same command
    goes on. Any field of the recipe can be changed: --train.batch-size 32, --periodic.row-scale 0.25.

    Args:
        out: folder for the results; by default out/RECIPE.
        seeds: how many seeds; every number is then the mean over them.
        optimizers: comma-separated, of the recipe's; all by default.
        steps: of each run; the recipe's by default.
        threads: processor threads; all cores by default.
        fresh: start over where runs exist, deleting them.
        spectra: record, at every tenth refresh, how far row steps are from spectral ones; figures in the runs' folders.
    """

    out: Path | None = None
    seeds: int = 1
    optimizers: str | None = None
    steps: int | None = None
    threads: int | None = None
    fresh: bool = False
    spectra: bool = False


def run(arguments: list[str]) -> int:
    options, comparison, recipe = parse_with_recipe("compare", CompareOptions, arguments)
    from rowdit.study.compare import Plan, compare
    from rowdit.study.report import write_report

    comparison = with_steps(comparison, options.steps)
    set_threads(options.threads)
    out = options.out or Path("out") / recipe
    check_folder(out)
    if options.optimizers is not None:
        items_of("--optimizers", options.optimizers)
    labels, seeds = comparison.select(options.optimizers), comparison.seeds(options.seeds)
    plan = Plan(comparison, recipe, labels, seeds, out, options.spectra)
    with no_empty_folder(out):
        summary = compare(plan, fresh=options.fresh)
    if summary is None:
        again = shlex.join(["rowdit", "compare", *(a for a in arguments if a != "--fresh")])
        return fail(f"stopped; everything is saved. To go on: {again}", 130)
    print(f"numbers  {out / 'summary.json'}\npage     {write_report(out)}")
    return 0
