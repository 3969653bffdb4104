"""The command line: verbs only. Each imports what it needs when it is called, so `rowdit --help` is quick.

A mistake of the user's ends in one line on the error stream and exit code 2; an interrupted run in exit code 130.
"""

from __future__ import annotations

import dataclasses
import errno
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

try:
    import tyro
except ModuleNotFoundError as missing:  # `pip install .` without the extra installs this command too
    sys.exit(f"rowdit: {missing}; the library alone is installed. The system: pip install '.[rowdit]' in the clone")

if TYPE_CHECKING:
    from rowdit.study.comparison import Comparison

Options = TypeVar("Options")

USAGE = """\
usage: rowdit VERB [ARGUMENTS]      rowdit VERB --help says more

  compare [RECIPE]         train the same model with AdamW, Muon and Periodic Row-wise Muon; who wins, and a page
  tune [RECIPE]            a grid of settings for one optimizer of a recipe
  report OUT               make the page of a finished comparison again
  data get fashion-mnist   fetch the full Fashion-MNIST, checked by its hashes
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    verb, rest = arguments[0], arguments[1:]
    if verb == "--version":
        from importlib.metadata import version

        print(f"rowmuon {version('rowmuon')}")
        return 0
    if verb not in VERBS:
        import difflib

        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(VERBS)}."
        return _fail(f"there is no verb {verb!r}; {hint}")
    try:
        return VERBS[verb](rest)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        return 1
    except ModuleNotFoundError as error:
        ours = str(error) == f"No module named {error.name!r}"  # Python's words; the weights' error has a way out
        return _fail(f"{error}; pip install '.[rowdit]' in the clone installs what is missing" if ours else str(error))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _fail(
                f"the disk is full ({error}); make room and run the same command again, it goes on where it was"
            )
        if isinstance(error, _user_errors()):
            return _fail(str(error))
        raise


def _user_errors() -> tuple[type[Exception], ...]:
    """Errors whose message is for the user, with no traceback: bad configs and data, a full disk."""
    from rowdit.data import DataError
    from rowdit.study.report import StudyError
    from rowdit.train.checkpoint import CheckpointError
    from rowdit.train.config import ConfigError

    return ConfigError, DataError, StudyError, CheckpointError, OSError


def _fail(message: str, code: int = 2) -> int:
    print(f"rowdit: {message}", file=sys.stderr)
    return code


# ---------------------------------------------------------------------------------------------------------------------
# compare


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
    """

    out: Path | None = None
    seeds: int = 1
    optimizers: str | None = None
    steps: int | None = None
    threads: int | None = None
    fresh: bool = False


def _compare(arguments: list[str]) -> int:
    options, comparison, recipe = _parse("compare", CompareOptions, arguments)
    from rowdit.study.compare import Plan, compare
    from rowdit.study.report import write_report

    comparison = _with_steps(comparison, options.steps)
    _set_threads(options.threads)
    out = options.out or Path("out") / recipe
    plan = Plan(comparison, recipe, comparison.select(options.optimizers), comparison.seeds(options.seeds), out)
    summary = compare(plan, fresh=options.fresh)
    if summary is None:
        again = shlex.join(["rowdit", "compare", *(a for a in arguments if a != "--fresh")])
        return _fail(f"stopped; everything is saved. To go on: {again}", 130)
    print(f"numbers  {out / 'summary.json'}\npage     {write_report(out)}")
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# tune


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


def _tune(arguments: list[str]) -> int:
    options, comparison, recipe = _parse("tune", TuneOptions, arguments)
    from rowdit.study.sweep import make_tasks, parse_grid, parse_seeds, print_sweep, sweep

    comparison = _with_steps(comparison, options.steps)
    out = options.out or Path("out") / f"tune-{recipe}"
    entries = [f"{key}={text}" for key, text in (("lr", options.lr), ("row_scale", options.row_scale)) if text]
    if not options.show:
        tasks = make_tasks(
            comparison, options.optimizer, parse_grid([*entries, *options.grid]), parse_seeds(options.seeds)
        )
        if not sweep(tasks, out, num_processes=options.processes):
            again = shlex.join(["rowdit", "tune", *arguments])
            return _fail(f"stopped; everything is saved. To go on: {again}", 130)
    print_sweep(out)
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# report, data


@dataclass(frozen=True)
class ReportOptions:
    """Makes OUT/report.html again from the records of a finished comparison."""

    out: tyro.conf.Positional[Path]


def _report(arguments: list[str]) -> int:
    options = _parse_plain("report", ReportOptions, arguments)
    from rowdit.study.report import write_report

    print(write_report(options.out))
    return 0


@dataclass(frozen=True)
class DataGetOptions:
    """Fetches a data set from its public address and checks its hashes.

    Args:
        folder: where to put it.
    """

    folder: Path | None = None


def _data(arguments: list[str]) -> int:
    if arguments[:2] != ["get", "fashion-mnist"]:
        if {"-h", "--help"}.intersection(arguments):
            print("usage: rowdit data get fashion-mnist [--folder FOLDER]")
            return 0
        return _fail("usage: rowdit data get fashion-mnist [--folder FOLDER]")
    options = _parse_plain("data get fashion-mnist", DataGetOptions, arguments[2:])
    from rowdit.data.download import get_fashion_mnist

    print(get_fashion_mnist(options.folder))
    return 0


VERBS: dict[str, Callable[[list[str]], int]] = {
    "compare": _compare,
    "tune": _tune,
    "report": _report,
    "data": _data,
}


# ---------------------------------------------------------------------------------------------------------------------
# parsing


def _parse(verb: str, options_class: type[Options], arguments: list[str]) -> tuple[Options, Comparison, str]:
    """The verb's options, the recipe with what is overridden in it, and the recipe's name."""
    from rowdit import recipes
    from rowdit.study.comparison import Comparison

    # The recipe comes first, because what can be overridden, and the defaults that --help shows, are the recipe's.
    has_recipe = bool(arguments) and not arguments[0].startswith("-")
    name = arguments[0] if has_recipe else "quickstart"
    comparison = recipes.load(name)

    part = tyro.conf.arg(name="")  # no prefix: --out and --train.steps, not --options.out
    fields = [
        ("options", Annotated[options_class, part], field(default_factory=options_class)),
        ("comparison", Annotated[Comparison, part], field(default_factory=lambda: comparison)),
    ]
    Command = dataclasses.make_dataclass("Command", fields, frozen=True)
    command: Any = tyro.cli(
        Command,
        prog=f"rowdit {verb} [{'|'.join(recipes.RECIPES)}]",
        description=" ".join((options_class.__doc__ or "").partition("\n\n")[0].split()),
        args=arguments[1:] if has_recipe else arguments,
        config=(tyro.conf.AvoidSubcommands,),
    )
    return command.options, command.comparison, name


def _parse_plain(verb: str, options_class: type[Options], arguments: list[str]) -> Options:
    """Options alone, as positional arguments and flags."""
    return tyro.cli(options_class, prog=f"rowdit {verb}", args=arguments)


def _with_steps(comparison: Comparison, steps: int | None) -> Comparison:
    if steps is None:
        return comparison
    return dataclasses.replace(comparison, train=dataclasses.replace(comparison.train, steps=steps))


def _set_threads(threads: int | None) -> None:
    import torch

    from rowdit.train.config import ConfigError

    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads = {threads}: must be an integer >= 1")
        torch.set_num_threads(threads)
