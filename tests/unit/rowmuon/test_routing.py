"""Which parameter goes where: ordered rules, total and printed; the rules for Diffusion Transformers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rowmuon
from rowdit.models.dit import DiT, DiTConfig
from rowmuon import Rule, param_groups
from rowmuon.routing import clean_name

REST = Rule(".*", "adamw")


def model() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(8, 24), "b": nn.Linear(24, 8), "conv": nn.Conv2d(4, 8, 3)})


def table_of(groups: rowmuon.ParamGroups) -> dict[str, tuple[str, int]]:
    """name -> (algorithm, chunks) as the groups have it."""
    return {name: (group["algorithm"], group.get("chunks", 1)) for group in groups for name, _ in group["params"]}


# ------------------------------------------------------------------------------------------------------------- rules
def test_the_first_match_wins_and_every_parameter_lands_once() -> None:
    rules = [
        Rule("bias", "adamw", what="vectors"),
        Rule(r"^a\.", "muon", chunks=3, what="fused"),
        Rule(r"\.weight$", "muon", what="matrices"),
    ]
    groups = param_groups(model(), rules, muon={"lr": 0.02}, adamw={"lr": 1e-3, "betas": (0.9, 0.99)})
    assert table_of(groups) == {
        "a.weight": ("muon", 3), "b.weight": ("muon", 1), "conv.weight": ("muon", 1),
        "a.bias": ("adamw", 1), "b.bias": ("adamw", 1), "conv.bias": ("adamw", 1),
    }  # fmt: skip
    assert [group["lr"] for group in groups] == [0.02, 0.02, 1e-3]
    optimizer = rowmuon.PeriodicRowMuon(groups)
    assert optimizer.param_groups[2]["betas"] == (0.9, 0.99)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 6


def test_groups_print_as_a_table() -> None:
    text = str(param_groups(model(), [Rule(r"^a\.weight", "muon", chunks=3, what="the fused one"), REST]))
    lines = text.splitlines()
    assert lines[0].split() == ["parameter", "shape", "algorithm", "chunks", "rule"]
    assert len(lines) == 2 + 6
    (row,) = [line for line in lines if line.startswith("a.weight ")]
    assert row.split(maxsplit=4) == ["a.weight", "24x8", "muon", "3", "the fused one"]
    assert any(line.split()[:3] == ["conv.weight", "8x4x3x3", "adamw"] for line in lines)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunks": 0}, "rule 'x': chunks=0 isn't an integer >= 1"),
        ({"chunks": 2.0}, "chunks=2.0 isn't an integer >= 1"),
        ({"chunks": True}, "chunks=True"),
        ({"max_ndim": "1"}, "max_ndim='1' isn't an integer >= 0"),
        ({"stack_dims": -1}, "stack_dims=-1 isn't an integer >= 0"),
        ({"algorithm": "adamw", "chunks": 3}, "chunks=3, .* sends it to AdamW"),
        ({"algorithm": "adamw", "stack_dims": 0}, "stack_dims=0 .* sends it to AdamW"),
    ],
)
def test_a_rules_own_settings_are_checked(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rule("x", **{"algorithm": "muon", **settings})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.Linear(2, 2).parameters(), [REST]), "takes the model.*not a generator"),
        ((nn.Linear(2, 2), REST), r"isn't a sequence: give \[Rule\("),
        ((nn.Linear(2, 2), "weight"), "rules='weight' isn't a sequence"),
        ((nn.Linear(2, 2), None), "rules=None isn't a sequence"),
        ((nn.Linear(2, 2), ["weight", REST]), "rules hold 'weight', which isn't a Rule"),
    ],
)
def test_what_is_no_model_or_no_rules_is_named(arguments: tuple, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        param_groups(*arguments)


def test_rules_may_come_from_a_generator() -> None:
    rules = [Rule(r"\.weight$", "muon"), REST]
    assert table_of(param_groups(model(), (rule for rule in rules))) == table_of(param_groups(model(), rules))


def test_a_rule_for_the_second_name_of_a_tied_parameter_says_so() -> None:
    net = nn.ModuleDict({"emb": nn.Embedding(5, 4), "mid": nn.Linear(4, 4), "head": nn.Linear(4, 5, bias=False)})
    net["head"].weight = net["emb"].weight
    rules = [Rule("^head", "adamw"), Rule(r"^mid\.weight", "muon"), REST]
    with pytest.raises(ValueError, match=r"match no parameter: \['\^head'\].*'head.weight' is tied to 'emb.weight'"):
        param_groups(net, rules)


def test_an_uncovered_parameter_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"no rule covers \['a.bias', 'b.bias', 'conv.bias'\].*Rule\('\.\*', 'adamw'\)"
    ):
        param_groups(model(), [Rule("weight", "muon")])


def test_a_dead_rule_is_an_error_unless_optional() -> None:
    with pytest.raises(ValueError, match=r"match no parameter: \['atention'\].*optional=True"):
        param_groups(model(), [Rule("atention", "muon"), Rule("weight", "muon"), REST])
    param_groups(model(), [Rule("atention", "muon", optional=True), Rule("weight", "muon"), REST])
    # hidden behind an earlier one it is as dead
    with pytest.raises(ValueError, match=r"match no parameter: \['a\.weight'\]"):
        param_groups(model(), [Rule("weight", "muon"), Rule("a.weight", "muon"), REST])


def test_an_empty_muon_set_is_an_error() -> None:
    with pytest.raises(ValueError, match="AdamW under another name.*'a.weight'.*require_muon=False"):
        param_groups(model(), [REST])
    groups = param_groups(model(), [REST], require_muon=False)
    assert [group["algorithm"] for group in groups] == ["adamw"]


def test_what_muon_cant_take_is_an_error() -> None:
    for rule, message in (
        (Rule("bias", "muon"), r"'bias' sends 'a.bias' of shape \(24,\) to Muon.*max_ndim=1"),
        (Rule("a.weight", "muon", chunks=5), r"chunks=5 doesn't divide the 24 rows of 'a.weight' \(24, 8\)"),
        (Rule("a.weight", "muon", stack_dims=1), "stack_dims=1 leaves no matrix of 'a.weight'"),
    ):
        with pytest.raises(ValueError, match=message):
            param_groups(model(), [rule, REST])


def test_a_rule_checks_itself() -> None:
    with pytest.raises(ValueError, match="algorithm 'sgd' is neither"):
        Rule(".*", "sgd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rule '\(' isn't a regular expression"):
        Rule("(", "muon")


def test_max_ndim_and_stack_dims() -> None:
    net = nn.Module()
    net.experts = nn.Parameter(torch.zeros(4, 8, 6))
    net.flat_stack = nn.Parameter(torch.zeros(4, 8, 6))
    net.gain = nn.Parameter(torch.ones(6))
    rules = [Rule(".*", "adamw", max_ndim=1), Rule("flat", "muon", stack_dims=0), Rule(".*", "muon")]
    optimizer = rowmuon.PeriodicRowMuon(param_groups(net, rules))
    assert sorted(b.matrix_numel for b in optimizer.plan("refresh").buckets) == [48, 192]
    assert optimizer.plan("refresh").num_orthogonalizations(0) == 4 + 1


def test_names_without_what_wrappers_add() -> None:
    assert (
        clean_name("module._orig_mod.blocks.0._checkpoint_wrapped_module.attn.qkv.weight") == "blocks.0.attn.qkv.weight"
    )
    assert clean_name("_fsdp_wrapped_module.fc.weight") == "fc.weight"
    assert clean_name("my_module.weight") == "my_module.weight"
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")
    assert table_of(param_groups(compiled, [Rule(r"^0\.weight$", "muon"), REST])) == {
        "0.weight": ("muon", 1), "0.bias": ("adamw", 1)
    }  # fmt: skip


def test_frozen_parameters_are_routed_too_and_tied_ones_once() -> None:
    net = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False), "c": nn.Linear(4, 4)})
    net["b"].weight = net["a"].weight
    net["c"].requires_grad_(False)
    groups = param_groups(net, [Rule("weight", "muon"), REST])
    assert set(table_of(groups)) == {"a.weight", "c.weight", "c.bias"}
    rowmuon.PeriodicRowMuon(groups)


# -------------------------------------------------------------------------------------------------------- rules.DIT
def dit(**settings: int) -> DiT:
    config = {"image_size": 8, "in_channels": 3, "patch_size": 2, "hidden_size": 16, "depth": 2, "num_heads": 2}
    return DiT(DiTConfig(**{**config, "num_classes": 5, **settings}))


def test_rules_for_dit() -> None:
    net = dit()
    table = table_of(param_groups(net, rowmuon.rules.DIT))
    muon = {name: chunks for name, (algorithm, chunks) in table.items() if algorithm == "muon"}
    assert muon == {
        f"blocks.{block}.{name}.weight": chunks
        for block in range(2)
        for name, chunks in (
            ("attn.qkv", 3), ("attn.proj", 1), ("mlp.fc1", 1), ("mlp.fc2", 1), ("adaLN_modulation.1", 6)
        )
    }  # fmt: skip
    assert set(table) == {name for name, _ in net.named_parameters()}
    assert all(net.get_parameter(name).ndim > 1 for name in muon)
    for name in ("x_embedder", "t_embedder", "y_embedder", "final_layer"):
        assert {algorithm for key, (algorithm, _) in table.items() if key.startswith(name)} == {"adamw"}


def test_adaln_can_go_to_adamw() -> None:
    net = dit()
    with_muon, with_adamw = (
        table_of(param_groups(net, rules)) for rules in (rowmuon.rules.DIT, rowmuon.rules.dit("adamw"))
    )
    moved = {name for name in with_muon if with_muon[name] != with_adamw[name]}
    assert moved == {f"blocks.{block}.adaLN_modulation.1.weight" for block in range(2)}
    assert all(with_adamw[name] == ("adamw", 1) for name in moved)
    with pytest.raises(ValueError, match="neither 'muon' nor 'adamw'"):
        rowmuon.rules.dit("sgd")  # type: ignore[arg-type]


def test_fused_matrices_can_stay_fused() -> None:
    net = dit()
    chunked, fused = (table_of(param_groups(net, rowmuon.rules.dit(chunked=chunked))) for chunked in (True, False))
    assert {count for _, count in fused.values()} == {1}
    assert {name.split(".", 2)[2] for name in chunked if chunked[name] != fused[name]} == {
        "attn.qkv.weight",
        "adaLN_modulation.1.weight",
    }


def test_a_dit_trains_by_these_groups() -> None:
    net = dit()
    groups = param_groups(net, rowmuon.rules.DIT, muon={"lr": 0.01}, adamw={"lr": 0.01})
    optimizer = rowmuon.PeriodicRowMuon(groups, adjust_lr_fn="match_rms_adamw", weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(8, 3, 8, 8, generator=generator), torch.randn(8, 3, 8, 8, generator=generator)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = (net(x, torch.full((8,), 0.5), torch.arange(8) % 5) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses
    assert optimizer.traffic["refresh"].num_orthogonalizations == 4 * 2 * (3 + 1 + 1 + 1 + 6)


class DiffusersBlock(nn.Module):
    """The parameter names of diffusers' DiTTransformer2DModel."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm1 = nn.ModuleDict({
            "emb": nn.ModuleDict({
                "timestep_embedder": nn.ModuleDict({"linear_1": nn.Linear(d, d), "linear_2": nn.Linear(d, d)}),
                "class_embedder": nn.ModuleDict({"embedding_table": nn.Embedding(5, d)}),
            }),
            "linear": nn.Linear(d, 6 * d),
        })  # fmt: skip
        self.attn1 = nn.ModuleDict({name: nn.Linear(d, d) for name in ("to_q", "to_k", "to_v")})
        self.attn1["to_out"] = nn.ModuleList([nn.Linear(d, d)])
        self.ff = nn.ModuleDict({"net": nn.ModuleList([nn.ModuleDict({"proj": nn.Linear(d, 4 * d)}), nn.Identity(),
                                                       nn.Linear(4 * d, d)])})  # fmt: skip


def test_rules_for_diffusers_dit() -> None:
    net = nn.Module()
    net.pos_embed = nn.ModuleDict({"proj": nn.Conv2d(3, 16, 2)})
    net.transformer_blocks = nn.ModuleList([DiffusersBlock(16)])
    net.proj_out_1, net.proj_out_2 = nn.Linear(16, 32), nn.Linear(16, 12)
    table = table_of(param_groups(net, rowmuon.rules.DIT))
    block = "transformer_blocks.0."
    assert {name: chunks for name, (algorithm, chunks) in table.items() if algorithm == "muon"} == {
        block + "norm1.linear.weight": 6,
        **{block + f"attn1.to_{name}.weight": 1 for name in "qkv"},
        block + "attn1.to_out.0.weight": 1,
        block + "ff.net.0.proj.weight": 1,
        block + "ff.net.2.weight": 1,
    }
