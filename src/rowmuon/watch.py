"""Steps that have nothing to do: no gradient has ever come."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["MOST_EMPTY_STEPS", "GradientWatch"]

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
                warnings.warn(text, RuntimeWarning, stacklevel=5)
