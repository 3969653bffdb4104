"""State dicts of other optimizers and of other routings, made ready for loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rowmuon.optimizer import PeriodicRowMuon

__all__ = ["adapt_state_dict", "plain_copy"]


def plain_copy(attributes: dict[str, Any]) -> dict[str, Any]:
    """What can be pickled and copied of an optimizer: a process group is a handle of this process and stays out."""
    return {**attributes, "process_group": None}


def adapt_state_dict(state_dict: dict[str, Any], optimizer: PeriodicRowMuon) -> dict[str, Any]:
    """A copy of ``state_dict`` with everything that this optimizer's groups and states have.

    Missing group keys are taken from the optimizer, a missing step is 0 (the first step is a refresh then).
    ``torch.optim.Muon`` differs in just these. microsoft/dion's Muon keeps its momentum as M <- mu M + G under the
    name ``momentum``: it is scaled by 1 - mu into the form used here.

    Raises:
        ValueError: parameters whose algorithm or chunks differ, by name; other numbers of groups or parameters.
    """
    saved_groups = [dict(group) for group in state_dict["param_groups"]]
    saved_state = {key: dict(value) for key, value in state_dict["state"].items()}
    if len(saved_groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the state dict has {len(saved_groups)} parameter groups, the optimizer {len(optimizer.param_groups)}: "
            f"build it with the groups that were saved ({[_summary(group) for group in saved_groups]})"
        )
    problems = []
    for saved, group in zip(saved_groups, optimizer.param_groups, strict=True):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"the state dict has {len(saved['params'])} parameters where the optimizer has {len(group['params'])}, "
                f"in a group with algorithm={group['algorithm']!r}"
            )
        problems += _routing_problems(saved, group)
        foreign_momentum = float(saved.get("mu") or saved.get("momentum") or 0.0)
        for key, value in group.items():
            if key != "params":
                saved.setdefault(key, value)
        for index, parameter in zip(saved["params"], group["params"], strict=True):
            own = optimizer.state[parameter]
            entry = saved_state.get(index)
            if not entry:
                saved_state[index] = {k: v.clone() if hasattr(v, "clone") else v for k, v in own.items()}
            elif group["algorithm"] == "muon":
                if "momentum" in entry and "momentum_buffer" not in entry:
                    entry["momentum_buffer"] = entry.pop("momentum") * (1 - foreign_momentum)
                entry.setdefault("step", 0)
                entry["step"] = int(entry["step"])
                entry.setdefault("phase", 0)
                _check_shape(entry["momentum_buffer"], parameter, group, index)
            else:
                if "momentum" in entry and "variance" in entry:
                    entry["exp_avg"], entry["exp_avg_sq"] = entry.pop("momentum"), entry.pop("variance")
                entry.setdefault("step", saved.get("step", 0))
                _check_shape(entry["exp_avg"], parameter, group, index)
    if problems:
        raise ValueError("the state dict routes parameters otherwise: " + "; ".join(problems))
    return {**state_dict, "param_groups": saved_groups, "state": saved_state}


def _routing_problems(saved: dict[str, Any], group: dict[str, Any]) -> list[str]:
    problems = []
    names = group.get("param_names") or [f"params[{i}]" for i in range(len(group["params"]))]
    for key in ("algorithm", "chunks", "stack_dims"):
        if key in saved and key in group and saved[key] != group[key]:
            problems.append(f"{key}={saved[key]!r} in the state dict, {group[key]!r} here, for {names}")
    saved_names = saved.get("param_names")
    if saved_names and group.get("param_names") and list(saved_names) != list(names):
        moved = [f"{a!r} where this has {b!r}" for a, b in zip(saved_names, names, strict=True) if a != b]
        problems.append("other parameters or another order: " + ", ".join(moved))
    return problems


def _check_shape(buffer: Any, parameter: Any, group: dict[str, Any], index: Any) -> None:
    if tuple(buffer.shape) != tuple(parameter.shape):
        raise ValueError(
            f"state {index} has shape {tuple(buffer.shape)}, its parameter {tuple(parameter.shape)}, in a group with "
            f"algorithm={group['algorithm']!r}"
        )


def _summary(group: dict[str, Any]) -> str:
    return f"{group.get('algorithm', '?')} x {len(group['params'])}"
