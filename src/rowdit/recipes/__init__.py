"""Recipes: one function a comparison, returning a plain value. Its docstring gives command, machine, time and score."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rowdit.train.config import ConfigError, nearest

if TYPE_CHECKING:
    from rowdit.study.comparison import Comparison

RECIPES = ("quickstart",)


def load(name: str) -> Comparison:
    """The recipe with this name.

    Raises:
        ConfigError: there is none; the nearest is named.
    """
    if name not in RECIPES:
        raise ConfigError(f"there is no recipe {name!r}{nearest(name, RECIPES)}")
    return importlib.import_module(f"rowdit.recipes.{name}").recipe()
