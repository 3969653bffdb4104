"""A parameter's state, and state dicts of other optimizers and of other routings made ready for loading."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rowmuon import adamw
from rowmuon.factors import GRAM_KEYS, check_gram_period, gram_dtypes, init_gram_state, place_mean
from rowmuon.groups import check_hyper, flops_per_matrix
from rowmuon.layout import local_tensor
from rowmuon.period import assign_phases, check_period
from rowmuon.update import spectral_scale

if TYPE_CHECKING:
    from rowmuon.optimizer import PeriodicRowMuon

__all__ = ["adapt_state_dict", "finish_loading", "init_state", "stagger_phases"]


def init_state(parameter: Tensor, group: Mapping[str, Any], optimizer: PeriodicRowMuon) -> dict[str, Any]:
    """The state of a parameter before its first step: the same keys on every rank, placed like the parameter.

    Of what Gram row steps keep, the factor is whole on every rank.
    """
    if group["algorithm"] == "adamw":
        return adamw.init_state(parameter, group)
    dtype, like = optimizer.state_dtype, torch.preserve_format
    momentum = torch.zeros_like(parameter, dtype=dtype, memory_format=like, requires_grad=False)
    kept = init_gram_state(parameter, optimizer._gram_shape(parameter), optimizer._layouts[parameter])
    return {"momentum_buffer": momentum, "step": 0, "phase": 0, **kept}


def stagger_phases(optimizer: PeriodicRowMuon, keep: bool = False) -> None:
    """Gives each parameter the phase in which it refreshes; ``keep``: unless the states have some."""
    layouts, state = optimizer._layouts, optimizer.state
    muon = [(group, p) for group in optimizer.param_groups if group["algorithm"] == "muon" for p in group["params"]]
    if keep and any(state[p]["phase"] for _, p in muon):
        return
    costs = [flops_per_matrix(layouts[p], group, "any") * layouts[p].num_matrices for group, p in muon]
    for (_, p), phase in zip(muon, assign_phases(costs, [group["period"] for group, _ in muon]), strict=True):
        state[p]["phase"] = phase


@dataclass(frozen=True)
class _Kept:
    """A tensor that torch's loading, which casts all it sees to the parameter's dtype, doesn't see."""

    tensor: Tensor


def adapt_state_dict(state_dict: dict[str, Any], optimizer: PeriodicRowMuon) -> dict[str, Any]:
    """A copy of ``state_dict`` with everything that this optimizer's groups and states have.

    Missing group keys are taken from the optimizer, a missing step is 0 (the first step is a refresh then), a missing
    state is a new one. ``torch.optim.Muon`` differs in just these. Of microsoft/dion's Muon the state's ``momentum``
    (M <- mu M + G there, so scaled by 1 - mu) and ``variance`` and the groups' ``mu``, ``beta1``, ``beta2``,
    ``epsilon`` and ``adjust_lr`` are translated.

    Raises:
        ValueError: parameters whose algorithm or chunks differ, or whose state is another optimizer's, by name; other
            numbers of groups or parameters; settings out of range.
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
        names = group.get("param_names") or [f"params[{i}]" for i in range(len(group["params"]))]
        problems += _routing_problems(saved, group, names)
        _translate_group(saved, group, optimizer)
        mu = saved.get("mu", 0.0)
        for key, value in group.items():
            if key != "params":
                saved.setdefault(key, value)
        for index, parameter, name in zip(saved["params"], group["params"], names, strict=True):
            entry = saved_state.get(index) or init_state(parameter, group, optimizer)
            translate = _adamw_entry if group["algorithm"] == "adamw" else _muon_entry
            saved_state[index] = _with_gram(translate(entry, saved, mu), parameter, optimizer)
            problems += _state_problems(saved_state[index], parameter, group, name)
    if problems:
        raise ValueError("the state dict doesn't fit: " + "; ".join(problems))
    for saved in saved_groups:
        check_hyper(saved, "the state dict")
        check_gram_period(saved, optimizer.options, "the state dict")
    for saved, group in zip(saved_groups, optimizer.param_groups, strict=True):
        for index, parameter in zip(saved["params"], group["params"], strict=True):
            saved_state[index] = _copied(saved_state[index], parameter, optimizer)
    return {**state_dict, "param_groups": saved_groups, "state": saved_state}


def finish_loading(optimizer: PeriodicRowMuon) -> None:
    """After torch's loading or unpickling: what it casts away, and what the constructor decides."""
    for group in optimizer.param_groups:
        if group["algorithm"] == "adamw":
            adamw.repair_state(group, optimizer.state)
            continue
        group["period"] = check_period(group["period"])  # JSON makes lists of tuples
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            momentum = state["momentum_buffer"]
            if isinstance(momentum, _Kept):
                momentum = momentum.tensor
            dtype = optimizer.state_dtype or parameter.dtype
            state["momentum_buffer"] = momentum.to(device=parameter.device, dtype=dtype)
            _finish_gram(state, optimizer.ns_dtype)
            if not optimizer.stagger:
                state["phase"] = 0


def _with_gram(entry: dict[str, Any], parameter: Tensor, optimizer: PeriodicRowMuon) -> dict[str, Any]:
    """What Gram row steps keep: dropped where this optimizer takes none, new where it isn't there or of another shape.

    The next step is a refresh where it is new.
    """
    kept = {key: entry.pop(key) for key in GRAM_KEYS if key in entry}
    shape = optimizer._gram_shape(parameter)
    if shape is None:
        return entry
    sizes = dict(zip(GRAM_KEYS, (shape.packed_size, shape.size), strict=False))
    fits = len(kept) == len(GRAM_KEYS) and all(tuple(kept[key].shape) == size for key, size in sizes.items())
    return {**entry, **(kept if fits else init_gram_state(parameter, shape, optimizer._layouts[parameter]))}


def _finish_gram(state: dict[str, Any], ns_dtype: torch.dtype) -> None:
    if "gram_ema" in state:
        for key, dtype in zip(GRAM_KEYS[:2], gram_dtypes(ns_dtype), strict=True):
            value = state[key].tensor if isinstance(state[key], _Kept) else state[key]
            state[key] = value.to(device=local_tensor(state["momentum_buffer"]).device, dtype=dtype)
        state["num_grams"] = int(state["num_grams"])


def _muon_entry(entry: dict[str, Any], saved: Mapping[str, Any], mu: float) -> dict[str, Any]:
    out = dict(entry)
    if "momentum" in out and "momentum_buffer" not in out:
        out["momentum_buffer"] = out.pop("momentum") * (1 - mu)
    out["step"], out["phase"] = int(out.get("step", 0)), int(out.get("phase", 0))
    return out


def _adamw_entry(entry: dict[str, Any], saved: Mapping[str, Any], mu: float) -> dict[str, Any]:
    out = dict(entry)
    if "momentum" in out and "variance" in out:
        out["exp_avg"], out["exp_avg_sq"] = out.pop("momentum"), out.pop("variance")
    out.setdefault("step", saved.get("step", 0))
    return out


def _copied(entry: dict[str, Any], parameter: Tensor, optimizer: PeriodicRowMuon) -> dict[str, Any]:
    """The caller's tensors stay the caller's; the momentum keeps its dtype."""
    out = {}
    shape = optimizer._gram_shape(parameter)
    for key, value in entry.items():
        if isinstance(value, Tensor):
            if key == "gram_ema" and shape is not None:
                value = place_mean(value, parameter, shape, optimizer._layouts[parameter])
            elif key in ("step", *GRAM_KEYS):
                value = getattr(value, "full_tensor", value.clone)()
            else:
                value = _placed_like(value, parameter)
        out[key] = value
    for key in ("momentum_buffer", *GRAM_KEYS[:2]):
        if key in out:
            out[key] = _Kept(out[key])
    return out


def _placed_like(value: Tensor, parameter: Tensor) -> Tensor:
    """A copy of a state's tensor, placed as the parameter is.

    A whole tensor is cut without sending anything; one that is sharded in another way is gathered first, by all ranks.
    """
    target, mesh = getattr(parameter, "placements", None), getattr(parameter, "device_mesh", None)
    if getattr(value, "placements", None) == target and getattr(value, "device_mesh", None) == mesh:
        return value.clone()
    gather = getattr(value, "full_tensor", None)
    whole = value if gather is None else gather()
    if mesh is None:
        return whole.clone()
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(parameter.device), mesh, target, src_data_rank=None).clone()


def _translate_group(saved: dict[str, Any], group: Mapping[str, Any], optimizer: PeriodicRowMuon) -> None:
    """Settings of microsoft/dion's Muon under the names used here.

    Raises:
        ValueError: its rule for the learning rate has no counterpart here on these shapes.
    """
    if "mu" not in saved:
        return
    saved.setdefault("betas", (saved.get("beta1", 0.9), saved.get("beta2", 0.95)))
    saved.setdefault("eps", saved.get("epsilon", group["eps"]))
    if group["algorithm"] != "muon":
        return
    saved.setdefault("momentum", saved["mu"])
    if "adjust_lr_fn" in saved or "adjust_lr" not in saved:
        return
    scales = {
        "rms_norm": lambda m, n: 0.2 * math.sqrt(max(m, n)),
        "spectral_norm": lambda m, n: math.sqrt(m / n),
        None: lambda m, n: 1.0,
    }
    theirs = scales[saved["adjust_lr"]]
    shapes = [optimizer._layouts[parameter].matrix_shape for parameter in group["params"]]
    for name in ("original", "match_rms_adamw"):
        if all(math.isclose(theirs(*shape), spectral_scale(*shape, name)) for shape in shapes):
            saved["adjust_lr_fn"] = name
            return
    raise ValueError(
        f"the state dict scales lr by adjust_lr={saved['adjust_lr']!r}, which is neither 'original' nor "
        f"'match_rms_adamw' for all of the shapes {sorted(set(shapes))}. Convert its groups' lr and give them the "
        "adjust_lr_fn that it is then meant for, before loading."
    )


def _routing_problems(saved: Mapping[str, Any], group: Mapping[str, Any], names: list[str]) -> list[str]:
    problems = []
    # A group of torch's or dion's Muon says one of these. A state tells too, but there is none before the first step,
    # and another optimizer's group would only leave its lr and eps behind.
    own = {"muon": ("ns_steps", "mu"), "adamw": ("betas", "mu")}[group["algorithm"]]
    if "algorithm" not in saved and not any(key in saved for key in own):
        problems.append(
            f"a group of another optimizer, with {sorted(set(saved) - {'params', 'param_names'})}, for {names}, whose "
            f"algorithm is {group['algorithm']!r}"
        )
    for key in ("algorithm", "chunks", "stack_dims"):
        if key in saved and key in group and saved[key] != group[key]:
            problems.append(f"{key}={saved[key]!r} in the state dict, {group[key]!r} here, for {names}")
    saved_names = saved.get("param_names")
    if saved_names and group.get("param_names") and list(saved_names) != list(names):
        moved = [f"{a!r} where this has {b!r}" for a, b in zip(saved_names, names, strict=True) if a != b]
        problems.append("other parameters or another order: " + ", ".join(moved))
    return problems


def _state_problems(entry: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any], name: str) -> list[str]:
    needed = ["momentum_buffer"] if group["algorithm"] == "muon" else ["exp_avg", "exp_avg_sq"]
    if group.get("amsgrad"):
        needed.append("max_exp_avg_sq")
    for key in needed:
        if key not in entry:
            return [
                f"{name!r} is in a group with algorithm={group['algorithm']!r}, but its state has no {key!r}: "
                f"{sorted(entry)}"
            ]
        if tuple(entry[key].shape) != tuple(parameter.shape):
            return [f"{name!r} has shape {tuple(parameter.shape)}, its {key} {tuple(entry[key].shape)}"]
    return []


def _summary(group: Mapping[str, Any]) -> str:
    return f"{group.get('algorithm', '?')} x {len(group['params'])}"
