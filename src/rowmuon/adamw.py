"""AdamW groups: torch's own implementation on each rank's part. Elementwise, so sharding needs nothing further."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rowmuon.layout import local_tensor

__all__ = ["init_state", "repair_state", "step"]

_FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu")


def is_fused(group: Mapping[str, Any], parameter: Tensor) -> bool:
    """The fused kernel is taken unless the group says otherwise or the device has none."""
    if group["fused"] is not None:
        return group["fused"]
    return not group["foreach"] and parameter.device.type in _FUSED_DEVICES and parameter.is_floating_point()


def init_state(parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter, placed like it; ``step`` where torch's kernel wants it."""
    device = parameter.device if is_fused(group, parameter) or group["capturable"] else torch.device("cpu")
    state = {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False),
    }
    if group["amsgrad"]:
        state["max_exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
    return state


def repair_state(group: Mapping[str, Any], states: MutableMapping[Tensor, dict[str, Any]]) -> None:
    """After loading: the step as an fp32 tensor where the kernel wants it, whatever was saved."""
    for parameter in group["params"]:
        state = states.get(parameter)
        if state and "step" in state:
            device = parameter.device if is_fused(group, parameter) or group["capturable"] else torch.device("cpu")
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=device)


def step(group: Mapping[str, Any], states: Mapping[Tensor, dict[str, Any]]) -> None:
    """One AdamW step of those parameters that have a gradient, by ``torch.optim.adamw.adamw``."""
    for fused in (False, True):
        params = [p for p in group["params"] if p.requires_grad and p.grad is not None and is_fused(group, p) == fused]
        if not params:
            continue
        state = [states[p] for p in params]
        beta1, beta2 = group["betas"]
        adamw(
            [local_tensor(p) for p in params],
            [local_tensor(p.grad) for p in params],
            [local_tensor(s["exp_avg"]) for s in state],
            [local_tensor(s["exp_avg_sq"]) for s in state],
            [local_tensor(s["max_exp_avg_sq"]) for s in state] if group["amsgrad"] else [],
            [s["step"] for s in state],
            foreach=None if fused else group["foreach"],
            capturable=group["capturable"],
            fused=fused or None,
            has_complex=any(p.is_complex() for p in params),
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
