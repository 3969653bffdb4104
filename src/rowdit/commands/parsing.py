"""What the verbs share: options and a recipe from arguments, the error line, the thread count.

A mistake of the user's is one line on the error stream and exit code 2; an interrupted run is exit code 130.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from rowdit.commands.limits import check_processes, check_run
from rowdit.commands.ranks import rank, tell

if TYPE_CHECKING:
    from rowdit.study.comparison import Comparison

Options = TypeVar("Options")


def fail(message: str, code: int = 2) -> int:
    """Tells the user `message`, once for all ranks, and returns the exit code."""
    tell(message)
    return code


LISTS = ("--data", "--grid", "--peers", "--sizes", "--splits")
"""Options that take several values. Given twice, the parser would keep the last and drop the others unsaid."""


def from_arguments(Command: Any, prog: str, arguments: Sequence[str], **more: Any) -> Any:
    """What the arguments make of `Command`, a class with annotations; rank 0 alone prints help and mistakes."""
    return tyro.cli(Command, prog=prog, args=joined(arguments), console_outputs=rank() == 0, **more)


def joined(arguments: Sequence[str]) -> list[str]:
    """The arguments with the values of each of `LISTS` in one place, however often it is given.

    >>> joined(["--grid", "lr=1,2", "--seeds", "0", "--grid=momentum=0.9"])
    ['--grid', 'lr=1,2', 'momentum=0.9', '--seeds', '0']
    """
    found: list[list[str]] = [[]]  # each begins with an option, but for the first
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if option in LISTS:
            found.append([option, value] if equals else [option])
        elif argument.startswith("--"):
            found.append([argument])
        else:
            found[-1].append(argument)
    merged: dict[str, list[str]] = {}
    for index, part in enumerate(found):
        key = part[0] if part and part[0] in LISTS else str(index)
        merged[key] = merged[key] + part[1:] if key in merged else part
    return [argument for part in merged.values() for argument in part]


def items_of(option: str, text: str) -> list[str]:
    """The items of a comma-separated list.

    Raises:
        ConfigError: there are none, or one is empty.
    """
    from rowdit.train.plain import ConfigError

    items = [item.strip() for item in text.split(",")]
    if not all(items):
        what = "is empty" if not any(items) else "has an empty item"
        raise ConfigError(f"{option} {text!r} {what}: give at least one, comma-separated, or leave {option} out")
    return items


def parse_with_recipe(verb: str, options_class: type[Options], arguments: list[str]) -> tuple[Options, Comparison, str]:
    """The verb's options, the recipe with what is overridden in it, and the recipe's name."""
    from rowdit import recipes
    from rowdit.study.comparison import Comparison
    from rowdit.train.config import ConfigError

    # The recipe comes first, because what can be overridden, and the defaults that --help shows, are the recipe's.
    has_recipe = bool(arguments) and not arguments[0].startswith("-")
    name = arguments[0] if has_recipe else "quickstart"
    comparison = recipes.load(name)
    if not isinstance(comparison, Comparison):
        raise ConfigError(f"the recipe {name!r} is one run, not a comparison: rowdit train {name}")

    part = tyro.conf.arg(name="")  # no prefix: --out and --train.steps, not --options.out
    fields = [
        ("options", Annotated[options_class, part], field(default_factory=options_class)),
        ("comparison", Annotated[Comparison, part], field(default_factory=lambda: comparison)),
    ]
    Command = dataclasses.make_dataclass("Command", fields, frozen=True)
    command = from_arguments(
        Command,
        f"rowdit {verb} [{'|'.join(recipes.RECIPES)}]",
        arguments[1:] if has_recipe else arguments,
        description=" ".join((options_class.__doc__ or "").partition("\n\n")[0].split()),
        config=(tyro.conf.AvoidSubcommands,),
    )
    comparison = command.comparison
    check_run(comparison.run_config(comparison.select(None)[-1], comparison.train.seed), num_ranks=1)
    return command.options, comparison, name


def parse(verb: str, options_class: type[Options], arguments: list[str]) -> Options:
    """Options alone, as positional arguments and flags."""
    return from_arguments(options_class, f"rowdit {verb}", arguments)


def with_steps(comparison: Comparison, steps: int | None) -> Comparison:
    if steps is None:
        return comparison
    return dataclasses.replace(comparison, train=dataclasses.replace(comparison.train, steps=steps))


def set_threads(threads: int | None) -> None:
    """Processor threads of this process; None leaves torch's own choice."""
    import torch

    if threads is not None:
        check_processes("threads", threads)
        torch.set_num_threads(threads)
