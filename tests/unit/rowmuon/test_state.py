"""State dicts: round trips, other optimizers' ones, and those that don't fit."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowmuon
from optimizer_cases import assert_equal, copies, give_grads, make_params, mixed_optimizer, momentum_of, train

SHAPES = [(8, 8), (16, 4), (2, 4, 6), (5,)]


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(params: Sequence[Tensor], optimizer: torch.optim.Optimizer, **settings: Any):
    """New parameters with the same values, and an optimizer that has loaded ``optimizer``'s state dict."""
    others = [nn.Parameter(p.detach().clone()) for p in params]
    other = mixed_optimizer(others, **settings)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    return others, other


def frozen_copy(optimizer: torch.optim.Optimizer) -> tuple[Any, list[Tensor]]:
    """Everything that a refused load must leave as it is."""
    saved = optimizer.state_dict()
    tensors = [v.clone() for s in saved["state"].values() for v in s.values() if isinstance(v, Tensor)]
    plain = repr([{k: v for k, v in s.items() if not isinstance(v, Tensor)} for s in saved["state"].values()])
    return (repr(saved["param_groups"]), plain), tensors


# -------------------------------------------------------------------------------------------------------- round trips
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("saved_at", [1, 7])
@pytest.mark.parametrize(
    "settings",
    [
        {"period": 4},
        {"period": None},
        {"period": ((0, 3), (8, 1))},
        {"period": 3, "stagger": True},
        {"period": 3, "state_dtype": torch.float32},
        {"period": 2, "lr": torch.tensor(0.02), "row_scale": 0.25, "nesterov": False},
    ],
    ids=str,
)
def test_round_trip_continues_bit_equal(settings: dict[str, Any], saved_at: int, dtype: torch.dtype) -> None:
    params = make_params(SHAPES, dtype=dtype)
    optimizer = mixed_optimizer(params, **settings)
    train(optimizer, params, saved_at)
    others, other = resumed(params, optimizer, **settings)
    for parameter, twin in zip(params, others, strict=True):
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                assert_equal([other.state[twin][key]], [value])
            else:
                assert other.state[twin][key] == value
    kinds = train(optimizer, params, 12 - saved_at, start=saved_at)
    assert train(other, others, 12 - saved_at, start=saved_at) == kinds
    assert_equal(others, params)
    assert other.state[others[0]]["momentum_buffer"].dtype == (settings.get("state_dtype") or dtype)


def test_the_phase_survives() -> None:
    params = make_params(SHAPES)
    optimizer = mixed_optimizer(params, period=4)
    train(optimizer, params, 7)
    others, other = resumed(params, optimizer, period=4)
    assert train(other, others, 6, start=7) == ["row", "refresh", "row", "row", "row", "refresh"]


def test_the_state_is_there_from_the_start_with_the_same_keys() -> None:
    params = make_params(SHAPES)
    optimizer = mixed_optimizer(params)
    before = {i: sorted(entry) for i, entry in optimizer.state_dict()["state"].items()}
    assert before == {
        0: ["momentum_buffer", "phase", "step"],
        1: ["momentum_buffer", "phase", "step"],
        2: ["momentum_buffer", "phase", "step"],
        3: ["exp_avg", "exp_avg_sq", "step"],
    }
    train(optimizer, params, 2)
    assert {i: sorted(entry) for i, entry in optimizer.state_dict()["state"].items()} == before


def test_checkpoint_wins_for_the_method_the_constructor_for_how_it_is_computed() -> None:
    params = make_params(SHAPES)
    saved_settings = {
        "lr": 0.5, "weight_decay": 0.3, "momentum": 0.8, "nesterov": False, "adjust_lr_fn": "match_rms_adamw",
        "row_scale": 0.25, "period": 5, "maximize": True, "ns_steps": 4, "eps": 1e-6,
    }  # fmt: skip
    optimizer = mixed_optimizer(params, refresh="gather", stagger=True, bucket_bytes=99, **saved_settings)
    others, other = resumed(
        params, optimizer, lr=0.1, period=2, refresh="exchange", stagger=False, bucket_bytes=1_000,
        comm_dtype=torch.float32, ns_dtype=torch.float32, skip_nonfinite=True,
    )  # fmt: skip
    assert {key: other.param_groups[0][key] for key in saved_settings} == saved_settings
    assert other.param_groups[1]["lr"] == 1e-3
    assert (other.options.refresh, other.options.bucket_bytes) == ("exchange", 1_000)
    assert (other.options.comm_dtype, other.ns_dtype) == (torch.float32, torch.float32)
    assert other.skip_nonfinite and not other.stagger
    assert [other.state[p]["phase"] for p in others[:3]] == [0, 0, 0]
    assert train(other, others, 6) == ["refresh", "row", "row", "row", "row", "refresh"]


def test_an_unstaggered_checkpoint_can_be_staggered() -> None:
    params = make_params(SHAPES)
    optimizer = mixed_optimizer(params, period=3)
    train(optimizer, params, 4)
    others, other = resumed(params, optimizer, period=3, stagger=True)
    fresh = mixed_optimizer(make_params(SHAPES), period=3, stagger=True)
    assert [other.state[p]["phase"] for p in others[:3]] == [
        fresh.state[p]["phase"] for p in fresh.param_groups[0]["params"]
    ]
    assert train(other, others, 3, start=4) == ["mixed"] * 3


def test_muon_stays_muon() -> None:
    params = make_params([(8, 8)])
    optimizer = rowmuon.PeriodicRowMuon(params, lr=0.02, period=3)
    train(optimizer, params, 4)
    finish = rowmuon.Muon(params, lr=0.5)
    finish.load_state_dict(optimizer.state_dict())
    assert finish.param_groups[0]["lr"] == 0.02
    assert train(finish, params, 4, start=4) == ["refresh"] * 4


def test_loading_copies_the_state_dicts_tensors() -> None:
    params = make_params(SHAPES)
    optimizer = mixed_optimizer(params)
    train(optimizer, params, 2)
    saved = optimizer.state_dict()
    others, other = make_params(SHAPES), None
    other = mixed_optimizer(others)
    other.load_state_dict(saved)
    before = frozen_copy(optimizer)
    train(other, others, 2)
    after = frozen_copy(optimizer)
    assert before[0] == after[0]
    assert_equal(after[1], before[1])


def test_plain_data_through_json() -> None:
    params = make_params(SHAPES)
    optimizer = mixed_optimizer(params, period=((0, 3), (5, 1)))
    train(optimizer, params, 4)
    saved = optimizer.state_dict()
    saved["param_groups"] = json.loads(json.dumps(saved["param_groups"]))  # tuples become lists
    others = [nn.Parameter(p.detach().clone()) for p in params]
    other = mixed_optimizer(others)
    other.load_state_dict(saved)
    assert other.param_groups[0]["period"] == ((0, 3), (5, 1))
    assert train(other, others, 4, start=4) == train(optimizer, params, 4, start=4)
    assert_equal(others, params)


# --------------------------------------------------------------------------------------------- other optimizers' states
def test_torch_muons_state_dict_loads_and_the_first_step_is_a_refresh() -> None:
    params = make_params([(8, 8), (16, 4), (4, 4)])
    theirs = torch.optim.Muon(params, lr=0.03, weight_decay=0.2, momentum=0.9, nesterov=False, ns_steps=4)
    for step in range(5):
        give_grads(params[:2], step)  # the third has no gradient, so torch keeps no state of it
        theirs.step()
    others = [nn.Parameter(p.detach().clone()) for p in params]
    ours = rowmuon.PeriodicRowMuon(others, lr=1.0, period=3, row_scale=0.5)
    train(ours, others, 2)
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    group = ours.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["momentum"], group["ns_steps"]) == (0.03, 0.2, 0.9, 4)
    assert not group["nesterov"] and (group["period"], group["row_scale"]) == (3, 0.5)
    for parameter, other in zip(params[:2], others[:2], strict=True):
        assert torch.equal(momentum_of(ours, other), momentum_of(theirs, parameter))
    assert not momentum_of(ours, others[2]).any()  # not what it was before the load
    assert train(ours, others, 4) == ["refresh", "row", "row", "refresh"]


def test_torch_adamws_state_dict_loads_into_an_adamw_group() -> None:
    params = make_params([(8, 8), (5,)])
    theirs = torch.optim.AdamW(params, lr=1e-2, betas=(0.8, 0.9), fused=True)
    train(theirs, params, 4)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    ours = rowmuon.PeriodicRowMuon([{"params": others, "algorithm": "adamw"}])
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    train(theirs, params, 4, start=4)
    train(ours, others, 4, start=4)
    assert_equal(others, params)


def dion_state_dict(params: Sequence[Tensor], adjust_lr: str | None, mu: float = 0.9) -> dict[str, Any]:
    """As microsoft/dion's Muon saves it: https://github.com/microsoft/dion, dion/muon.py."""
    common = {"lr": 0.03, "mu": mu, "beta1": 0.85, "beta2": 0.97, "weight_decay": 0.2, "step": 6, "epsilon": 1e-9,
              "nesterov": True, "flatten": False, "adjust_lr": adjust_lr}  # fmt: skip
    state: dict[int, dict[str, Tensor]] = {}
    for i, parameter in enumerate(params):
        state[i] = {"momentum": torch.full_like(parameter, 2.0)}
        if parameter.ndim < 2:
            state[i]["variance"] = torch.full_like(parameter, 3.0)
    matrices = [i for i, p in enumerate(params) if p.ndim >= 2]
    groups = [
        {**common, "algorithm": "muon", "params": matrices},
        {**common, "algorithm": "adamw", "params": [i for i in range(len(params)) if i not in matrices]},
    ]
    return {"state": state, "param_groups": groups}


@pytest.mark.parametrize("mu", [0.9, 0.0])
def test_dions_state_dict_loads(mu: float) -> None:
    params = make_params([(16, 8), (8, 8), (5,)])
    optimizer = mixed_optimizer(params)
    optimizer.load_state_dict(through_a_file(dion_state_dict(params, "rms_norm", mu)))
    muon, adamw = optimizer.param_groups
    assert (muon["lr"], muon["momentum"], muon["nesterov"]) == (0.03, mu, True)
    assert (muon["adjust_lr_fn"], muon["period"]) == ("match_rms_adamw", 3)
    assert (adamw["betas"], adamw["eps"], adamw["weight_decay"]) == ((0.85, 0.97), 1e-9, 0.2)
    # there M <- mu M + G, here M <- mu M + (1 - mu) G
    assert torch.allclose(momentum_of(optimizer, params[0]), torch.full((16, 8), 2.0 * (1 - mu)))
    assert bool((optimizer.state[params[2]]["exp_avg"] == 2).all())
    assert bool((optimizer.state[params[2]]["exp_avg_sq"] == 3).all())
    assert optimizer.state[params[2]]["step"].item() == 6
    assert train(optimizer, params, 3) == ["refresh", "row", "row"]


def test_dions_rules_for_lr_are_translated_or_refused() -> None:
    for adjust_lr, shapes, expected in (
        ("spectral_norm", [(16, 8), (8, 8), (5,)], "original"),  # sqrt(m / n): ours is the same where m >= n
        (None, [(8, 16), (8, 8), (5,)], "original"),
    ):
        optimizer = mixed_optimizer(params := make_params(shapes), adjust_lr_fn="match_rms_adamw")
        optimizer.load_state_dict(dion_state_dict(params, adjust_lr))
        assert optimizer.param_groups[0]["adjust_lr_fn"] == expected
    optimizer = mixed_optimizer(params := make_params([(8, 16), (5,)]))
    saved = dion_state_dict(params, "spectral_norm")
    with pytest.raises(ValueError, match=r"adjust_lr='spectral_norm'.*\(8, 16\).*give them the adjust_lr_fn"):
        optimizer.load_state_dict(saved)
    saved["param_groups"][0]["adjust_lr_fn"] = "original"
    optimizer.load_state_dict(saved)


# ---------------------------------------------------------------------------------------------------- what doesn't fit
def named(**muon: Any) -> tuple[list[nn.Parameter], rowmuon.PeriodicRowMuon]:
    params = make_params([(12, 4), (4, 4), (5,)])
    groups = [
        {"params": [("qkv", params[0]), ("out", params[1])], **muon},
        {"params": [("bias", params[2])], "algorithm": "adamw"},
    ]
    return params, rowmuon.PeriodicRowMuon(groups, lr=0.02)


def refusals() -> dict[str, tuple[Any, str]]:
    def other_chunks(saved: dict[str, Any]) -> None:
        saved["param_groups"][0]["chunks"] = 3

    def other_algorithm(saved: dict[str, Any]) -> None:
        saved["param_groups"][0]["algorithm"] = "adamw"

    def other_names(saved: dict[str, Any]) -> None:
        saved["param_groups"][0]["param_names"] = ["out", "qkv"]

    def fewer_groups(saved: dict[str, Any]) -> None:
        saved["param_groups"].pop()

    def fewer_params(saved: dict[str, Any]) -> None:
        saved["param_groups"][0]["params"].pop()

    def other_shape(saved: dict[str, Any]) -> None:
        saved["state"][0]["momentum_buffer"] = torch.zeros(4, 12)

    def adams_state(saved: dict[str, Any]) -> None:
        saved["state"][1] = {"exp_avg": torch.zeros(4, 4), "exp_avg_sq": torch.zeros(4, 4), "step": torch.tensor(2.0)}

    def muons_state(saved: dict[str, Any]) -> None:
        saved["state"][2] = {"momentum_buffer": torch.zeros(5)}

    def bad_lr(saved: dict[str, Any]) -> None:
        saved["param_groups"][1]["lr"] = -1.0

    def bad_period(saved: dict[str, Any]) -> None:
        saved["param_groups"][0]["period"] = 0

    return {
        "chunks": (other_chunks, r"chunks=3 in the state dict, 1 here, for \['qkv', 'out'\]"),
        "algorithm": (other_algorithm, r"algorithm='adamw' in the state dict, 'muon' here, for \['qkv', 'out'\]"),
        "names": (other_names, "another order: 'out' where this has 'qkv'"),
        "groups": (fewer_groups, r"1 parameter groups, the optimizer 2.*muon x 2"),
        "params": (fewer_params, "1 parameters where the optimizer has 2"),
        "shape": (other_shape, r"'qkv' has shape \(12, 4\), its momentum_buffer \(4, 12\)"),
        "Adam's state": (adams_state, r"'out' is in a .*algorithm='muon', but .* no 'momentum_buffer'.*exp_avg"),
        "Muon's state": (muons_state, "'bias' is in a group with algorithm='adamw', but .* no 'exp_avg'"),
        "lr": (bad_lr, "lr=-1.0 in the state dict"),
        "period": (bad_period, "period=0 is less than 1"),
    }  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), refusals().values(), ids=refusals())
def test_what_doesnt_fit_is_refused_by_name_and_changes_nothing(spoil: Any, message: str) -> None:
    params, optimizer = named()
    train(optimizer, params, 2)
    saved = optimizer.state_dict()
    spoiled = {
        "state": {k: dict(v) for k, v in saved["state"].items()},
        "param_groups": [{**group, "params": list(group["params"])} for group in saved["param_groups"]],
    }
    spoil(spoiled)
    before = frozen_copy(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(spoiled)
    after = frozen_copy(optimizer)
    assert after[0] == before[0]
    assert_equal(after[1], before[1])
    optimizer.load_state_dict(saved)
    assert optimizer.next_step_kind == "row"


def test_torch_adamws_state_dict_doesnt_load_into_a_muon_group() -> None:
    params = make_params([(8, 8)])
    theirs = torch.optim.AdamW(params)
    train(theirs, params, 1)
    ours = rowmuon.PeriodicRowMuon([("weight", params[0])])
    with pytest.raises(ValueError, match=r"'weight' is in a group with algorithm='muon'"):
        ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda params: torch.optim.SGD(params, lr=0.1, nesterov=False)])
def test_another_optimizers_state_dict_is_refused_before_its_first_step_too(make: Any) -> None:
    """There is no state yet to tell them apart."""
    params = make_params([(8, 8)])
    saved = make(params).state_dict()
    assert saved["state"] == {}
    ours = rowmuon.PeriodicRowMuon([("weight", params[0])], lr=0.02)
    with pytest.raises(ValueError, match=r"another optimizer.*\['weight'\], whose algorithm is 'muon'"):
        ours.load_state_dict(saved)
    assert ours.param_groups[0]["lr"] == 0.02


def test_torch_muons_state_dict_doesnt_load_into_an_adamw_group_before_its_first_step() -> None:
    params = make_params([(8, 8)])
    ours = rowmuon.PeriodicRowMuon([{"params": [("weight", params[0])], "algorithm": "adamw"}])
    with pytest.raises(ValueError, match="another optimizer.*whose algorithm is 'adamw'"):
        ours.load_state_dict(torch.optim.Muon(params).state_dict())


def test_torch_optimizers_of_the_right_kind_load_before_their_first_step() -> None:
    params = make_params([(8, 8)])
    muon = rowmuon.PeriodicRowMuon(params)
    muon.load_state_dict(torch.optim.Muon(params, lr=0.3).state_dict())
    adamw = rowmuon.PeriodicRowMuon([{"params": params, "algorithm": "adamw"}])
    adamw.load_state_dict(torch.optim.AdamW(params, lr=0.3).state_dict())
    assert [o.param_groups[0]["lr"] for o in (muon, adamw)] == [0.3, 0.3]


def test_the_callers_state_dict_stays_as_it_is() -> None:
    params = make_params([(16, 8), (8, 8), (5,)])
    saved = dion_state_dict(params, "rms_norm")
    keys = [sorted(entry) for entry in (*saved["state"].values(), *saved["param_groups"])]
    before = copies([entry["momentum"] for entry in saved["state"].values()])
    optimizer = mixed_optimizer(params)
    optimizer.load_state_dict(saved)
    train(optimizer, params, 2)
    assert [sorted(entry) for entry in (*saved["state"].values(), *saved["param_groups"])] == keys
    assert_equal([entry["momentum"] for entry in saved["state"].values()], before)
