"""Gradients that no step can take, and steps that have nothing to do since no gradient has ever come."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from rowmuon.groups import name_of

__all__ = ["MOST_EMPTY_STEPS", "GradientWatch", "check_gradients"]

MOST_EMPTY_STEPS = 10
"""Some call ``step()`` once before training, to please a scheduler; nobody does so ten times."""


class GradientWatch:
    """Says so while no trainable parameter has had a gradient yet, and gives up after `MOST_EMPTY_STEPS` steps.

    Other optimizers then do nothing, without a word, and the loss stays where it is. A model whose parameters are all
    frozen for now is no such case, nor is one whose gradients stop coming later.
    """

    def __init__(self) -> None:
        self._num_empty_steps = 0
        self._is_done = False

    def look(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """At the begin of each step.

        Raises:
            RuntimeError: as above. The first time it is a warning.
        """
        if self._is_done:
            return
        trainable = [p for group in groups for p in group["params"] if p.requires_grad]
        if any(p.grad is not None for p in trainable):
            self._is_done = True
        elif trainable:
            self._num_empty_steps += 1
            text = (
                f"none of this optimizer's {len(trainable)} trainable parameters has had a gradient yet, so its steps "
                "change nothing. Build the optimizer after everything that replaces parameters (fully_shard, "
                "parallelize_module, to_empty, a change of dtype), from the model that is trained, and call "
                "backward() before step()."
            )
            if self._num_empty_steps >= MOST_EMPTY_STEPS:
                raise RuntimeError(f"after {self._num_empty_steps} steps, {text}")
            if self._num_empty_steps == 1:
                warnings.warn(text, RuntimeWarning, stacklevel=6)


def check_gradients(groups: Sequence[Mapping[str, Any]]) -> None:
    """Before a step changes anything.

    Raises:
        ValueError: a sparse gradient; the parameter is named.
    """
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                algorithm = {"muon": "Muon", "adamw": "AdamW"}[group["algorithm"]]
                raise ValueError(
                    f"parameter {name_of(group, parameter)!r} has a sparse gradient; {algorithm} needs a dense one"
                )
