"""What each step looks at before it changes anything: gradients that it can't take or that never come, and settings
and states that are no longer what the constructor checked and made."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rowmuon.groups import ADAMW_KEYS, MUON_KEYS, RATES, check_hyper, check_rates, name_of

__all__ = ["MOST_EMPTY_STEPS", "GradientWatch", "GroupWatch", "Watch"]

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
            ValueError: a sparse gradient; the parameter is named.
            RuntimeError: as above. The first time it is a warning.
        """
        _check_gradients(groups)
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


_KEYS = {"muon": MUON_KEYS, "adamw": ADAMW_KEYS}
_STATE_KEYS = {"muon": ("momentum_buffer", "step", "phase"), "adamw": ("exp_avg", "exp_avg_sq", "step")}
# settings as a tuple, which costs less to get and to compare than anything that asks for them one by one
_RATES = {algorithm: operator.itemgetter(*(key for key in RATES if key in keys)) for algorithm, keys in _KEYS.items()}
_OTHERS = {
    algorithm: operator.itemgetter("algorithm", *(key for key in keys if key not in RATES))
    for algorithm, keys in _KEYS.items()
}


class GroupWatch:
    """Checks what was changed in ``param_groups`` since it was checked last, and that no state is gone.

    A step may come after any change, so each looks, by comparing what it finds with what it found. No tensor is read.
    """

    def __init__(self) -> None:
        self._rates: dict[int, tuple[Any, ...]] = {}  # by the group's place
        self._others: dict[int, tuple[Any, ...]] = {}

    def look(self, groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """At the begin of each step.

        Args:
            groups: of the optimizer.
            states: of its parameters.

        Raises:
            ValueError: a setting that is out of range or gone, or an algorithm that isn't the one that the group was
                built with; a parameter without its state. Group, parameter, value and way out are named.
        """
        num_params = 0
        for place, group in enumerate(groups):
            num_params += len(group["params"])
            algorithm: Any = group.get("algorithm")
            try:
                rates, others = _RATES[algorithm](group), _OTHERS[algorithm](group)
            except (KeyError, TypeError):
                rates = others = ()
            if not others or others != self._others.get(place):
                _check_group(group, place, states)
            elif any(map(operator.is_not, rates, self._rates[place])):
                _check_settings(check_rates, group, place)
            self._rates[place], self._others[place] = rates, others
        if len(states) < num_params:
            for place, group in enumerate(groups):
                _check_states(group, place, states)


class Watch:
    """Both, of one optimizer."""

    def __init__(self) -> None:
        self.gradients = GradientWatch()
        self.groups = GroupWatch()


def _check_group(group: Mapping[str, Any], place: int, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
    algorithm = group.get("algorithm")
    if algorithm not in _KEYS:
        raise ValueError(f"{_called(group, place)}: algorithm={algorithm!r} is neither 'muon' nor 'adamw'")
    missing = [key for key in _KEYS[algorithm] if key not in group]
    _check_states(group, place, states)
    if missing:
        raise ValueError(f"{_called(group, place)} has lost its {', '.join(missing)}: set them again")
    _check_settings(check_hyper, group, place)


def _check_settings(check: Any, group: Mapping[str, Any], place: int) -> None:
    try:
        check(group, "it", read=False)
    except ValueError as error:
        raise ValueError(f"{_called(group, place)} was changed: {error}") from None


def _check_states(group: Mapping[str, Any], place: int, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Raises ValueError for the first parameter that hasn't the state of its group's algorithm."""
    algorithm = group["algorithm"]
    for parameter in group["params"]:
        found = states.get(parameter) or {}
        if all(key in found for key in _STATE_KEYS[algorithm]):
            continue
        name = name_of(group, parameter)
        other = next((other for other in _KEYS if other != algorithm and _STATE_KEYS[other][0] in found), None)
        if other is not None:
            raise ValueError(
                f"{_called(group, place)} says algorithm={algorithm!r}, but was built with {other!r}: {name!r} has the "
                "state of that. Set it back, or build another optimizer."
            )
        raise ValueError(
            f"parameter {name!r} of {_called(group, place)} has no state: {sorted(found)}. The constructor makes "
            "it, and nothing makes it again. To start afresh, build another optimizer; to go on, load_state_dict()."
        )


def _called(group: Mapping[str, Any], place: int) -> str:
    first = name_of(group, group["params"][0]) if group["params"] else "no parameters"
    more = f" and {len(group['params']) - 1} more" if len(group["params"]) > 1 else ""
    return f"param_groups[{place}] ({first}{more})"


def _check_gradients(groups: Sequence[Mapping[str, Any]]) -> None:
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                algorithm = {"muon": "Muon", "adamw": "AdamW"}[group["algorithm"]]
                raise ValueError(
                    f"parameter {name_of(group, parameter)!r} has a sparse gradient; {algorithm} needs a dense one"
                )
