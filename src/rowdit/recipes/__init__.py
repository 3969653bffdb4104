"""Recipes: one function a run or a comparison, returning a plain value. Its docstring gives command, machine, time and
score.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rowdit.train.config import ConfigError, nearest

if TYPE_CHECKING:
    from rowdit.study.comparison import Comparison
    from rowdit.train.config import RunConfig

RECIPES = (
    "quickstart",
    "fashion_s",
    "folder",
    "imagenet256",
    "scale_1p3b",
    "scale_2b",
    "scale_4b",
    "scale_9b",
    "scale_15b",
)
SIZED = ("imagenet256",)
"""Those that come in sizes, after a colon: `imagenet256:XL/2`."""


def load(name: str) -> RunConfig | Comparison:
    """The recipe with this name: one run, or a comparison of several.

    Raises:
        ConfigError: there is none, or not in that size; the nearest is named.
    """
    base, colon, size = name.partition(":")
    if base not in RECIPES:
        raise ConfigError(f"there is no recipe {base!r}{nearest(base, RECIPES)}")
    if colon and base not in SIZED:
        raise ConfigError(f"the recipe {base!r} has no sizes; leave {colon + size!r} out")
    return importlib.import_module(f"rowdit.recipes.{base}").recipe(*([size] if colon else []))
