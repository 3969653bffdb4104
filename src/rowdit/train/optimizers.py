"""AdamW, Muon and Periodic Row-wise Muon from one config, as equals.

The Muon pair comes from `rowmuon`'s public names, as any other user would take it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import rowmuon
from rowdit.train.config import EXPERIMENTS, ConfigError, OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that `config` describes, over the trainable parameters of `model`.

    Call it before the model is wrapped or sharded: the routing goes by parameter names.

    Raises:
        ConfigError: an experimental `cheap_step`; `rowdit.study.steps.build_optimizer` makes those.
    """
    if config.cheap_step in EXPERIMENTS:
        raise ConfigError(f"cheap_step = {config.cheap_step!r} is experimental; only compare, tune and study know it")
    if config.name == "adamw":
        parameters = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(
            parameters,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
    return _build_muon(model, config)


def step_kind(optimizer: torch.optim.Optimizer) -> str:
    """What the optimizer's next step will be: `"refresh"`, `"row"`, `"mixed"`, or `"adamw"` for torch's AdamW."""
    return getattr(optimizer, "next_step_kind", "adamw")


def _build_muon(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    groups, common = muon_arguments(model, config)
    if config.name == "muon":
        return rowmuon.Muon(groups, **common)
    own: dict[str, Any] = {"period": config.period, "row_scale": config.row_scale}
    if config.cheap_step == "gram_row":
        own["cheap_step"] = "gram_row"
        if config.cheap_step_parameter is not None:
            own["gram_damping"] = config.cheap_step_parameter
    return rowmuon.PeriodicRowMuon(groups, **common, **own)


def muon_arguments(model: nn.Module, config: OptimizerConfig) -> tuple[rowmuon.ParamGroups, dict[str, Any]]:
    """Parameter groups, and the arguments that `rowmuon.Muon` and `rowmuon.PeriodicRowMuon` have in common."""
    muon: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    adamw: dict[str, Any] = {
        "lr": config.lr if config.adamw_lr is None else config.adamw_lr,
        "weight_decay": config.weight_decay,
        "betas": config.betas,
        "eps": config.eps,
    }
    rules = rowmuon.rules.dit(adaln=config.adaln, chunked=config.chunked)
    groups = rowmuon.param_groups(model, rules=rules, muon=muon, adamw=adamw)
    common: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "momentum": config.momentum,
        "nesterov": config.nesterov,
        "adjust_lr_fn": config.adjust_lr_fn,
        "ns_coefficients": config.ns_coefficients,
        "state_dtype": None if config.state_dtype is None else getattr(torch, config.state_dtype),
        "overlap": config.overlap,
    }
    return groups, common
