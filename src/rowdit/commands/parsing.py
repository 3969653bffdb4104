"""What the verbs share: options and a recipe from arguments, the error line, the thread count.

A mistake of the user's is one line on the error stream and exit code 2; an interrupted run is exit code 130.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

if TYPE_CHECKING:
    from rowdit.study.comparison import Comparison

Options = TypeVar("Options")


def fail(message: str, code: int = 2) -> int:
    """Prints `message` for the user and returns the exit code."""
    print(f"rowdit: {message}", file=sys.stderr)
    return code


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
    command: Any = tyro.cli(
        Command,
        prog=f"rowdit {verb} [{'|'.join(recipes.RECIPES)}]",
        description=" ".join((options_class.__doc__ or "").partition("\n\n")[0].split()),
        args=arguments[1:] if has_recipe else arguments,
        config=(tyro.conf.AvoidSubcommands,),
    )
    return command.options, command.comparison, name


def parse(verb: str, options_class: type[Options], arguments: list[str]) -> Options:
    """Options alone, as positional arguments and flags."""
    return tyro.cli(options_class, prog=f"rowdit {verb}", args=arguments)


def with_steps(comparison: Comparison, steps: int | None) -> Comparison:
    if steps is None:
        return comparison
    return dataclasses.replace(comparison, train=dataclasses.replace(comparison.train, steps=steps))


def set_threads(threads: int | None) -> None:
    import torch

    from rowdit.train.config import ConfigError

    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads = {threads}: must be an integer >= 1")
        torch.set_num_threads(threads)
