"""Which parameters of a DiT, with every option, go to Muon and in how many chunks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rowmuon
from rowdit.models import DiT, DiTConfig

BASE = {"image_size": 8, "in_channels": 3, "patch_size": 2, "hidden_size": 16, "depth": 1, "num_heads": 2}
CLASSES, CAPTIONS = {"num_classes": 5}, {"num_classes": 0, "caption_dim": 6}
MLP = {"gelu": {"mlp.fc1": 1, "mlp.fc2": 1}, "swiglu": {"mlp.w1": 1, "mlp.w2": 1, "mlp.w3": 1}}


def routed(model: nn.Module) -> dict[str, tuple[str, int]]:
    groups = rowmuon.param_groups(model, rowmuon.rules.DIT)
    return {name: (g["algorithm"], g.get("chunks", 1)) for g in groups for name, _ in g["params"]}


@pytest.mark.parametrize("mlp", MLP)
@pytest.mark.parametrize("condition", [CLASSES, CAPTIONS], ids=["classes", "captions"])
@pytest.mark.parametrize(
    "others", [{}, {"qk_norm": True, "positions": "rope", "learn_sigma": True}], ids=["plain", "all"]
)
def test_block_matrices_go_to_muon_and_nothing_else(mlp: str, condition: dict, others: dict) -> None:
    with torch.device("meta"):
        model = DiT(DiTConfig(**BASE, **condition, **others, mlp=mlp))  # type: ignore[arg-type]
    found = routed(model)
    assert set(found) == {name for name, _ in model.named_parameters()}
    muon = {
        name.removeprefix("blocks.0."): chunks for name, (algorithm, chunks) in found.items() if algorithm == "muon"
    }
    expected = {"attn.qkv": 3, "attn.proj": 1, "adaLN_modulation.1": 6, **MLP[mlp]}
    assert muon == {f"{name}.weight": chunks for name, chunks in expected.items()}


def test_a_fused_swiglu_of_others_is_two_matrices() -> None:
    model = nn.ModuleDict({"x_embedder": nn.Linear(4, 8), "blocks": nn.ModuleList([nn.ModuleDict({
        "mlp": nn.ModuleDict({"w12": nn.Linear(8, 32), "w3": nn.Linear(16, 8)})
    })])})  # fmt: skip
    found = routed(model)
    assert found["blocks.0.mlp.w12.weight"] == ("muon", 2) and found["blocks.0.mlp.w3.weight"] == ("muon", 1)


def test_the_real_class_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        model = diffusers.DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, num_layers=1, sample_size=8, num_embeds_ada_norm=5
        )
    block = "transformer_blocks.0."
    assert {name: chunks for name, (algorithm, chunks) in routed(model).items() if algorithm == "muon"} == {
        block + "norm1.linear.weight": 6,
        **{block + f"attn1.to_{name}.weight": 1 for name in ("q", "k", "v", "out.0")},
        block + "ff.net.0.proj.weight": 1,
        block + "ff.net.2.weight": 1,
    }
