"""Parameter groups: what each algorithm's group holds, its defaults, and checks of its settings."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rowmuon.coefficients import resolve_coefficients
from rowmuon.layout import Layout, layout_of
from rowmuon.orthogonalize import Kernels, newton_schulz_flops
from rowmuon.period import check_period
from rowmuon.routing import default_stack_dims
from rowmuon.update import AdjustLr

__all__ = [
    "ADAMW_DEFAULTS",
    "ADAMW_KEYS",
    "MUON_KEYS",
    "PLAN_KEYS",
    "RATES",
    "AdjustLr",
    "check_dtype",
    "check_hyper",
    "check_params",
    "check_rates",
    "complete_group",
    "flops_per_matrix",
    "muon_layout",
    "name_of",
    "position_of",
    "prune_group",
]

MUON_KEYS = (
    "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "maximize",
    "period", "row_scale", "chunks", "stack_dims",
)  # fmt: skip
ADAMW_DEFAULTS: Mapping[str, Any] = {
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "amsgrad": False,
    "foreach": None,
    "fused": None,
    "capturable": False,
}
ADAMW_KEYS = ("lr", "weight_decay", "maximize", *ADAMW_DEFAULTS)
_COMMON = ("params", "param_names", "algorithm")
RATES = ("lr", "weight_decay", "momentum")
"""Settings that schedules change from step to step."""
PLAN_KEYS = ("ns_coefficients", "ns_steps", "eps", "chunks", "stack_dims")
"""Settings that plans are made of: a change of them in a group asks for another plan."""
_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")


def complete_group(param_group: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The group with its algorithm's defaults filled in, checked. The caller's dict stays as it is.

    Raises:
        ValueError: an unknown key (the nearest one is named), an unknown algorithm, a value out of range.
    """
    if not isinstance(param_group, dict):
        raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
    group = dict(param_group)
    algorithm = group.setdefault("algorithm", "muon")
    if algorithm not in ("muon", "adamw"):
        raise ValueError(f"algorithm={algorithm!r} in a group is neither 'muon' nor 'adamw'")
    own = MUON_KEYS if algorithm == "muon" else ADAMW_KEYS
    for key in group:
        if key not in (*own, *_COMMON, *_SCHEDULERS):
            near = difflib.get_close_matches(key, (*own, *_COMMON), 1)
            hint = f"; did you mean {near[0]!r}?" if near else f". Known: {', '.join(own)}"
            raise ValueError(f"unknown key {key!r} in a group with algorithm={algorithm!r}{hint}")
    if algorithm == "muon":
        group.setdefault("chunks", 1)
        group.setdefault("stack_dims", None)
        if group.get("ns_steps") is None and ("ns_coefficients" in group or "ns_steps" in group):
            coefficients = group.get("ns_coefficients", defaults["ns_coefficients"])
            group["ns_steps"] = len(resolve_coefficients(coefficients, None))
    else:
        for key, value in ADAMW_DEFAULTS.items():
            group.setdefault(key, value)
    for key in own:
        if key in defaults:
            group.setdefault(key, defaults[key])
    check_hyper(group, f"a group with algorithm={algorithm!r}")
    if algorithm == "muon":
        group["period"] = check_period(group["period"])
    return group


def prune_group(group: dict[str, Any]) -> None:
    """Takes out what torch filled in from the constructor's defaults but an AdamW group doesn't have."""
    if group["algorithm"] == "adamw":
        for key in set(MUON_KEYS) - set(ADAMW_KEYS):
            group.pop(key, None)


def check_hyper(group: Mapping[str, Any], where: str, *, read: bool = True) -> None:
    """Checks a group's settings.

    Args:
        group: with all of its algorithm's settings.
        where: the group, as the message calls it.
        read: whether the value of an ``lr`` that is a tensor on the CPU may be read.

    Raises:
        ValueError: naming the setting, its value and what it may be.
    """
    check_rates(group, where, read=read)
    _check_number("eps", group["eps"], where, positive=group.get("algorithm") != "adamw")
    for name in ("maximize", "nesterov", "amsgrad", "capturable"):
        if name in group and not isinstance(group[name], bool):
            raise ValueError(f"{name}={group[name]!r} in {where} is neither True nor False")
    if group.get("algorithm") == "adamw":
        for name in ("fused", "foreach"):
            if group[name] is not None and not isinstance(group[name], bool):
                raise ValueError(f"{name}={group[name]!r} in {where} isn't True, False or None")
        _check_betas(group["betas"], where)
        if group["fused"] and group["foreach"]:
            raise ValueError(f"fused and foreach can't both be True in {where}")
        if isinstance(group["lr"], Tensor) and group["foreach"] and not group["capturable"]:
            raise ValueError(f"lr in {where} is a tensor: with foreach=True that takes capturable=True, or fused=True")
        return
    _check_number("row_scale", group["row_scale"], where)
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise ValueError(
            f"adjust_lr_fn={group['adjust_lr_fn']!r} in {where} isn't None, 'original' or 'match_rms_adamw'"
        )
    chunks = group.get("chunks", 1)
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(f"chunks={chunks!r} in {where} isn't a positive integer")
    stack_dims = group.get("stack_dims")
    if stack_dims is not None and (isinstance(stack_dims, bool) or not isinstance(stack_dims, int) or stack_dims < 0):
        raise ValueError(f"stack_dims={stack_dims!r} in {where} isn't None or an integer >= 0")
    check_period(group["period"])
    resolve_coefficients(group["ns_coefficients"], group["ns_steps"])


def check_rates(group: Mapping[str, Any], where: str, *, read: bool = True) -> None:
    """Checks the settings that schedules change: lr, weight_decay and, of a Muon group, momentum. As `check_hyper`."""
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        _check_number("lr", lr, where)
    elif lr.numel() != 1:
        raise ValueError(f"lr in {where} is a tensor of shape {tuple(lr.shape)}; it must have one element")
    elif read and type(lr) is Tensor and lr.device.type == "cpu":  # not from another device, and fakes have none
        _check_number("lr", lr.item(), where)
    _check_number("weight_decay", group["weight_decay"], where)
    if "momentum" in group:
        _check_number("momentum", group["momentum"], where)
        if group["momentum"] >= 1.0:
            raise ValueError(f"momentum={group['momentum']!r} in {where} isn't in [0, 1)")


def check_dtype(name: str, dtype: object) -> None:
    """Raises ValueError unless ``dtype`` is one that Newton-Schulz and the momentum can have."""
    if dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"{name}={dtype} isn't torch.bfloat16, torch.float32 or torch.float64")


def _check_betas(betas: Any, where: str) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas={betas!r} in {where} aren't two numbers in [0, 1)")
    for beta in betas:
        if not isinstance(beta, Tensor) and not (isinstance(beta, (int, float)) and 0.0 <= beta < 1.0):
            raise ValueError(f"betas={betas!r} in {where} aren't two numbers in [0, 1)")


def _check_number(name: str, value: Any, where: str, positive: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r} in {where} isn't a finite number >= 0")
    if positive and value == 0:
        raise ValueError(f"{name}=0 in {where}: it must be > 0, since it takes the place of a norm of zero")


def name_of(group: Mapping[str, Any], parameter: Tensor) -> str:
    """A parameter's name in its group, or its position where the group has no names."""
    position = position_of(group, parameter)
    names = group.get("param_names")
    return names[position] if names else f"params[{position}]"


def position_of(group: Mapping[str, Any], parameter: Tensor) -> int:
    return next(i for i, p in enumerate(group["params"]) if p is parameter)


def check_params(group: Mapping[str, Any]) -> None:
    """What holds for the parameters of both algorithms.

    Raises:
        ValueError: a parameter that occurs twice, or is on the meta device; it is named.
    """
    seen: set[Tensor] = set()
    for parameter in group["params"]:
        if parameter in seen:
            raise ValueError(
                f"parameter {name_of(group, parameter)!r} occurs more than once in a group, and would be stepped as "
                "often. Give each parameter once; named_parameters() does so for tied ones."
            )
        seen.add(parameter)
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name_of(group, parameter)!r} is on the meta device: materialise and initialise the model "
                "first (to_empty, then its init), then build the optimizer."
            )


def muon_layout(parameter: Tensor, group: Mapping[str, Any], process_group: Any) -> Layout:
    """The layout of a parameter of a Muon group.

    Raises:
        ValueError: it can't be worked on (dimensions, dtype, chunks, placements); the parameter is named.
    """
    name = name_of(group, parameter)
    shape = tuple(parameter.shape)
    if parameter.ndim < 2:
        raise ValueError(
            f"parameter {name!r} of shape {shape} is in a Muon group, but Muon needs matrices. Route it to AdamW; if "
            "it is a flattened parameter of FSDP1, use FSDP2 (torch.distributed.fsdp.fully_shard): it keeps matrices."
        )
    if parameter.is_complex() or not parameter.is_floating_point():
        raise ValueError(f"parameter {name!r} has dtype {parameter.dtype}; Muon works on real floating point")
    stack_dims = group.get("stack_dims")
    if stack_dims is None:
        stack_dims = default_stack_dims(parameter.ndim)
    if not 0 <= stack_dims <= parameter.ndim - 2:
        raise ValueError(f"parameter {name!r} of shape {shape}: stack_dims={stack_dims} leaves no matrix")
    if shape[stack_dims] % group["chunks"]:
        raise ValueError(
            f"parameter {name!r} of shape {shape}: chunks={group['chunks']} doesn't divide its {shape[stack_dims]} rows"
        )
    return layout_of(parameter, name=name, stack_dims=stack_dims, chunks=group["chunks"], process_group=process_group)


def flops_per_matrix(layout: Layout, group: Mapping[str, Any], device: str, kernels: Kernels = "torch") -> int:
    """Of orthogonalising one matrix of a parameter of this group, on a device type (see `compute_device`)."""
    how: Any = {"coefficients": group["ns_coefficients"], "device_type": device, "kernels": kernels}
    return newton_schulz_flops(*layout.matrix_shape, group["ns_steps"], "auto", **how)
