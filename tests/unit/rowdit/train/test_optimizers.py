"""From a config to an optimizer: T23, the wanted parameters and no others under Muon."""

from __future__ import annotations

import pytest
import torch

import rowmuon
from rowdit.models.dit import DiT
from rowdit.train.config import OptimizerConfig
from rowdit.train.optimizers import build_optimizer, step_kind
from toy_training import MODEL, OPTIMIZERS


def _names(model: DiT, optimizer: torch.optim.Optimizer, algorithm: str) -> set[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [g for g in optimizer.param_groups if g.get("algorithm", "adamw") == algorithm]
    return {names[id(p)] for group in groups for p in group["params"]}


BLOCK = {f"blocks.0.{n}.weight" for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}


@pytest.mark.parametrize("adaln", ["muon", "adamw"])
@pytest.mark.parametrize("name", ["muon", "periodic"])
def test_the_matrices_of_the_blocks_go_to_muon(name: str, adaln: str) -> None:
    model = DiT(MODEL)
    optimizer = build_optimizer(model, OptimizerConfig(name=name, adaln=adaln))
    expected = BLOCK | ({"blocks.0.adaLN_modulation.1.weight"} if adaln == "muon" else set())
    assert _names(model, optimizer, "muon") == expected
    everything = {n for n, p in model.named_parameters() if p.requires_grad}
    assert _names(model, optimizer, "adamw") == everything - expected


def test_adamw_takes_everything() -> None:
    model = DiT(MODEL)
    optimizer = build_optimizer(model, OPTIMIZERS["adamw"])
    assert isinstance(optimizer, torch.optim.AdamW)
    assert _names(model, optimizer, "adamw") == {n for n, p in model.named_parameters() if p.requires_grad}


def test_every_setting_arrives() -> None:
    config = OptimizerConfig(
        name="periodic", lr=0.02, adamw_lr=0.0, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6, momentum=0.9,
        nesterov=False, adjust_lr_fn="original", ns_coefficients="polar_express", period=5, row_scale=0.25,
    )  # fmt: skip
    groups = build_optimizer(DiT(MODEL), config).param_groups
    for group in groups:
        assert group["weight_decay"] == 0.1
        if group["algorithm"] == "muon":
            assert (group["lr"], group["momentum"], group["nesterov"]) == (0.02, 0.9, False)
            assert (group["adjust_lr_fn"], group["period"], group["row_scale"]) == ("original", 5, 0.25)
            assert tuple(group["ns_coefficients"]) == tuple(rowmuon.COEFFICIENTS["polar_express"]) or (
                group["ns_coefficients"] == "polar_express"
            )
        else:
            assert (group["lr"], tuple(group["betas"]), group["eps"]) == (0.0, (0.8, 0.9), 1e-6)


@pytest.mark.parametrize("name", ["muon", "periodic"])
def test_fused_matrices_momentum_and_overlap_arrive(name: str) -> None:
    usual = build_optimizer(DiT(MODEL), OptimizerConfig(name=name))
    config = OptimizerConfig(name=name, chunked=False, state_dtype="bfloat16", overlap="backward")
    optimizer = build_optimizer(DiT(MODEL), config)
    assert {g["chunks"] for g in usual.param_groups if g["algorithm"] == "muon"} == {1, 3, 6}
    assert {g["chunks"] for g in optimizer.param_groups if g["algorithm"] == "muon"} == {1}
    for each, dtype, overlap in ((usual, torch.float32, None), (optimizer, torch.bfloat16, "backward")):
        dtypes = {s["momentum_buffer"].dtype for s in each.state.values() if "momentum_buffer" in s}
        assert dtypes == {dtype} and each.overlap == overlap


def test_kinds_of_steps() -> None:
    assert step_kind(build_optimizer(DiT(MODEL), OPTIMIZERS["adamw"])) == "adamw"
    assert step_kind(build_optimizer(DiT(MODEL), OPTIMIZERS["muon"])) == "refresh"
    optimizer = build_optimizer(DiT(MODEL), OPTIMIZERS["periodic"])
    assert step_kind(optimizer) == "refresh"
