"""Bad input gives an error that names the thing, its value and the way out, before anything has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rowmuon
from optimizer_cases import assert_equal, copies, give_grads, make_params, mixed_optimizer, momentum_of, train

NAN, INF = float("nan"), float("inf")

OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
    ({"lr": -0.1}, r"lr=-0.1 in the constructor isn't a finite number >= 0"),
    ({"lr": NAN}, "lr=nan"),
    ({"lr": INF}, "lr=inf"),
    ({"lr": "0.1"}, "lr='0.1'"),
    ({"lr": True}, "lr=True"),
    ({"lr": None}, "lr=None"),
    ({"lr": torch.tensor([0.1, 0.2])}, r"lr .* tensor of shape \(2,\); it must have one element"),
    ({"lr": torch.tensor(-0.1)}, "lr=-0.1"),
    ({"weight_decay": -1e-9}, "weight_decay=-1e-09"),
    ({"weight_decay": NAN}, "weight_decay=nan"),
    ({"momentum": 1.0}, r"momentum=1.0 .* isn't in \[0, 1\)"),
    ({"momentum": -0.1}, "momentum=-0.1"),
    ({"eps": 0.0}, "eps=0 .* > 0"),
    ({"eps": -1e-7}, "eps=-1e-07"),
    ({"row_scale": -1.0}, "row_scale=-1.0"),
    ({"row_scale": INF}, "row_scale=inf"),
    ({"nesterov": "no"}, "nesterov='no' .* neither True nor False"),
    ({"maximize": 1}, "maximize=1 .* neither True nor False"),
    ({"adjust_lr_fn": "rms"}, "adjust_lr_fn='rms' .* 'original' or 'match_rms_adamw'"),
    ({"period": 0}, "period=0 is less than 1. Give K >= 1"),
    ({"period": -3}, "period=-3"),
    ({"period": 2.5}, "period=2.5"),
    ({"period": True}, "period=True"),
    ({"period": ()}, r"period=\(\)"),
    ({"period": ((1, 3),)}, "must start at 0"),
    ({"period": ((0, 3), (5, 0))}, "K = 0 from step 5"),
    ({"period": ((0, 3), (0, 1))}, "must start at 0 and rise"),
    ({"period": ((0, 3), (5.0, 1))}, "the step 5.0 isn't an integer"),
    ({"period": ((0, 3, 1),)}, "isn't a pair"),
    ({"ns_steps": 0}, "ns_steps=0"),
    ({"ns_steps": 100}, "ns_steps=100"),
    ({"ns_steps": 2.0}, "ns_steps=2.0"),
    ({"ns_coefficients": (1.0, 2.0)}, "triple"),
    ({"ns_coefficients": (1.0, 2.0, NAN)}, "finite"),
    ({"ns_coefficients": ()}, "empty"),
    ({"ns_coefficients": "polar"}, "did you mean 'polar_express'"),
    ({"ns_coefficients": ((3.0, -3.0, 1.0),) * 4, "ns_steps": 5}, "4 iterations"),
    ({"refresh": "all_gather"}, "refresh='all_gather' is neither 'exchange' nor 'gather'"),
    ({"ns_dtype": torch.float16}, "ns_dtype=torch.float16"),
    ({"comm_dtype": torch.int8}, "comm_dtype=torch.int8"),
    ({"state_dtype": torch.int32}, "state_dtype=torch.int32"),
    ({"bucket_bytes": 0}, "bucket_bytes=0"),
    ({"bucket_bytes": 1.5}, "bucket_bytes=1.5"),
    ({"process_group": "x"}, r"process_group='x' isn't a process group.*group.WORLD"),
    ({"process_group": [0, 1]}, r"process_group=\[0, 1\] isn't a process group"),
]

OF_A_GROUP: list[tuple[dict[str, Any], str]] = [
    ({"chunks": 0}, "chunks=0 .* isn't a positive integer"),
    ({"chunks": 2.0}, "chunks=2.0"),
    ({"chunks": 3}, r"'weight' of shape \(8, 4\): chunks=3 doesn't divide its 8 rows"),
    ({"stack_dims": -1}, "stack_dims=-1"),
    ({"stack_dims": 1}, "stack_dims=1 leaves no matrix"),
    ({"stack_dims": "1"}, "stack_dims='1'"),
    ({"algorithm": "sgd"}, "algorithm='sgd' .* neither 'muon' nor 'adamw'"),
    ({"weight_dacay": 0.1}, "unknown key 'weight_dacay' .* did you mean 'weight_decay'"),
    ({"algoritm": "adamw"}, "unknown key 'algoritm' .* did you mean 'algorithm'"),
    ({"betas": (0.9, 0.95)}, "unknown key 'betas' in a group with algorithm='muon'"),
    ({"differentiable": True}, "unknown key 'differentiable'.*Known: lr, "),
    ({"algorithm": "adamw", "momentum": 0.9}, "unknown key 'momentum' in a group with algorithm='adamw'"),
    ({"algorithm": "adamw", "beta": (0.9, 0.95)}, "did you mean 'betas'"),
    ({"algorithm": "adamw", "betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
    ({"algorithm": "adamw", "betas": 0.9}, "betas=0.9"),
    ({"algorithm": "adamw", "betas": (0.9, "x")}, "betas="),
    ({"algorithm": "adamw", "eps": -1.0}, "eps=-1.0"),
    ({"algorithm": "adamw", "fused": True, "foreach": True}, "fused and foreach"),
    ({"algorithm": "adamw", "lr": torch.tensor(0.1), "foreach": True}, "capturable=True, or fused=True"),
]


@pytest.mark.parametrize(("settings", "message"), OUT_OF_RANGE, ids=str)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rowmuon.PeriodicRowMuon(make_params([(8, 4)]), **settings)


GROUP_SETTINGS = {"lr", "weight_decay", "momentum", "eps", "row_scale", "adjust_lr_fn", "period", "ns_steps"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [case for case in OUT_OF_RANGE if set(case[0]) <= GROUP_SETTINGS] + OF_A_GROUP,
    ids=str,
)
def test_a_groups_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("in the constructor", "in a group with algorithm='muon'")):
        rowmuon.PeriodicRowMuon([{"params": [("weight", make_params([(8, 4)])[0])], **settings}])


def test_the_edges_of_the_ranges_are_taken() -> None:
    params = make_params([(8, 4)])
    settings = {"lr": 0, "weight_decay": 0, "momentum": 0.0, "row_scale": 0, "ns_steps": 99, "bucket_bytes": 1}
    train(rowmuon.PeriodicRowMuon(params, period=2, **settings), params, 3)


def test_ns_steps_none_in_a_group() -> None:
    params = make_params([(8, 4), (8, 4)])
    groups = [
        {"params": params[:1], "ns_steps": None},
        {"params": params[1:], "ns_coefficients": [(2.0, -1.5, 0.5)] * 7},
    ]
    optimizer = rowmuon.PeriodicRowMuon(groups, lr=0.02, ns_steps=3)
    assert [group["ns_steps"] for group in optimizer.param_groups] == [5, 7]
    train(optimizer, params, 2)


@pytest.mark.parametrize("period", [[[0, 2], [3, 1]], [(0, 2), (3, 1)]], ids=str)
def test_a_schedule_may_be_lists(period: list[Any]) -> None:
    params = make_params([(8, 4)])
    optimizer = rowmuon.PeriodicRowMuon([{"params": params, "period": period}], lr=0.02)
    assert optimizer.param_groups[0]["period"] == ((0, 2), (3, 1))
    assert train(optimizer, params, 5) == ["refresh", "row", "refresh", "refresh", "refresh"]


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (nn.Parameter(torch.zeros(8)), r"'w' of shape \(8,\) is in a Muon group.*Route it to AdamW.*FSDP2"),
        (nn.Parameter(torch.zeros(())), r"'w' of shape \(\)"),
        (nn.Parameter(torch.zeros(4, 4, dtype=torch.cfloat)), "'w' has dtype torch.complex64"),
        (torch.zeros(4, 4, dtype=torch.int64), "'w' has dtype torch.int64"),
        (nn.Parameter(torch.zeros(4, 4, device="meta")), "'w' is on the meta device: materialise"),
    ],
    ids=["1-D", "0-D", "complex", "integer", "meta"],
)
def test_parameters_that_muon_cant_take(parameter: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rowmuon.PeriodicRowMuon([("w", parameter)])


def test_a_meta_parameter_of_adamw_is_named_too() -> None:
    group = {"params": [("b", nn.Parameter(torch.zeros(4, device="meta")))], "algorithm": "adamw"}
    with pytest.raises(ValueError, match="'b' is on the meta device"):
        rowmuon.PeriodicRowMuon([group])


@pytest.mark.parametrize("skip_nonfinite", [False, True])
@pytest.mark.parametrize("index", [0, 2], ids=["muon", "adamw"])
def test_a_sparse_gradient_is_named_before_anything_changes(index: int, skip_nonfinite: bool) -> None:
    params = make_params([(8, 8), (6, 6), (5,)])
    optimizer = mixed_optimizer(params, skip_nonfinite=skip_nonfinite)
    train(optimizer, params, 1)
    give_grads(params, 1)
    params[index].grad = params[index].grad.to_sparse()
    before = copies([*params, *(momentum_of(optimizer, p) for p in params[:2])])
    with pytest.raises(ValueError, match=rf"'params\[0\]' has a sparse gradient; {'AdamW' if index else 'Muon'}"):
        optimizer.step()
    assert_equal([*params, *(momentum_of(optimizer, p) for p in params[:2])], before)
    assert [optimizer.state[p]["step"] for p in params[:2]] == [1, 1]


@pytest.mark.parametrize(("key", "value"), [("chunks", 2), ("stack_dims", 1)])
def test_which_matrices_a_parameter_is_cannot_be_changed_later(key: str, value: int) -> None:
    # Without a word it would go on as built, and `describe` would show the new value.
    params = make_params([(8, 4, 3), (8, 4, 3)])
    optimizer = rowmuon.PeriodicRowMuon(
        [{"params": [("a", params[0])], "stack_dims": 0}, {"params": [("b", params[1])]}]
    )
    train(optimizer, params, 2)
    before = copies(params)
    old, optimizer.param_groups[0][key] = optimizer.param_groups[0][key], value
    for look in (optimizer.step, optimizer.describe):
        with pytest.raises(ValueError, match=rf"{key}={value}.*built with chunks=1, stack_dims=0 for parameter 'a'"):
            look()
    assert_equal(params, before)
    optimizer.param_groups[0][key] = old
    optimizer.param_groups[1]["stack_dims"] = 1  # what None meant
    train(optimizer, params, 2)


def test_a_non_leaf_and_something_else() -> None:
    with pytest.raises(ValueError, match="non-leaf"):
        rowmuon.PeriodicRowMuon([make_params([(4, 4)])[0] * 2])
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        rowmuon.PeriodicRowMuon([1.0])
    with pytest.raises(TypeError, match="must be a dict"):
        rowmuon.PeriodicRowMuon(make_params([(4, 4)])).add_param_group(make_params([(4, 4)]))


def test_muon_takes_no_period() -> None:
    params = make_params([(4, 4)])
    for settings in ({"period": 3}, {"row_scale": 0.5}, {"stagger": True}):
        with pytest.raises(TypeError, match=f"Muon takes no {next(iter(settings))}"):
            rowmuon.Muon(params, **settings)
    with pytest.raises(ValueError, match="period=3 in a group of Muon"):
        rowmuon.Muon([{"params": params, "period": 3}])
    with pytest.raises(TypeError, match="unexpected keyword"):
        rowmuon.PeriodicRowMuon(params, foreach=True)


@pytest.mark.parametrize("value", [0.02, "0.02"])
def test_numbers_of_numpy_are_numbers(value: Any) -> None:
    numpy = pytest.importorskip("numpy")
    lr = numpy.float32(value)
    params = make_params([(4, 4), (5,)])
    train(mixed_optimizer(params, lr=lr, weight_decay=numpy.float64(0.1)), params, 2)


# ------------------------------------------------------------------------------- what is changed after it was made


def change(key: str, value: Any) -> Any:
    def do(optimizer: rowmuon.PeriodicRowMuon, place: int) -> None:
        optimizer.param_groups[place][key] = value

    return do


def lose(key: str) -> Any:
    def do(optimizer: rowmuon.PeriodicRowMuon, place: int) -> None:
        del optimizer.param_groups[place][key]

    return do


def clear_state(optimizer: rowmuon.PeriodicRowMuon, place: int) -> None:
    optimizer.state.clear()


def drop_one_state(optimizer: rowmuon.PeriodicRowMuon, place: int) -> None:
    del optimizer.state[optimizer.param_groups[place]["params"][-1]]


LATER: list[tuple[int, Any, str]] = [
    *[(0, change(key, value), message) for settings, message in OUT_OF_RANGE
      if set(settings) <= GROUP_SETTINGS and message != "lr=-0.1"
      for key, value in settings.items()],
    (1, change("betas", (0.9, 1.0)), r"betas=\(0.9, 1.0\)"),
    (1, change("eps", -1.0), "eps=-1.0"),
    (1, change("lr", NAN), "lr=nan"),
    (1, change("fused", "yes"), "fused='yes'"),
    (0, change("algorithm", "adamw"), "says algorithm='adamw', but was built with 'muon': .*Set it back, or build"),
    (1, change("algorithm", "muon"), "says algorithm='muon', but was built with 'adamw'"),
    (0, change("algorithm", "sgd"), "algorithm='sgd' is neither"),
    (0, lose("period"), "has lost its period: set"),
    (1, lose("betas"), "has lost its betas"),
    (0, lose("algorithm"), "algorithm=None is neither"),
    (0, clear_state, "parameter .* has no state: .*build another optimizer; to go on, load_state_dict"),
    (1, clear_state, "parameter .* has no state"),
    (0, drop_one_state, "parameter .* has no state"),
    (1, drop_one_state, "parameter .* has no state"),
]  # fmt: skip


@pytest.mark.parametrize("num_steps", [0, 2], ids=["before the first step", "between steps"])
@pytest.mark.parametrize(
    ("place", "make_wrong", "message"), LATER, ids=[f"{place}-{message}" for place, _, message in LATER]
)
def test_what_was_made_wrong_later_is_told_before_anything_moves(
    place: int, make_wrong: Any, message: str, num_steps: int
) -> None:
    """Groups are open to everyone, and so is the state; the next step once ended in a KeyError."""
    params = make_params([(8, 4), (4, 4), (4,), (3,)])
    optimizer = rowmuon.PeriodicRowMuon(
        [{"params": params[:2]}, {"params": params[2:], "algorithm": "adamw"}], lr=0.02, period=2
    )
    train(optimizer, params, num_steps)
    give_grads(params, 0)
    before = [p.detach().clone() for p in params]
    make_wrong(optimizer, place)
    message = message.replace("in the constructor", "in it")
    for act in (optimizer.step, lambda: optimizer.next_step_kind, lambda: optimizer.plan("row")):
        with pytest.raises(ValueError, match=message) as raised:
            act()
        assert "param_groups[" in str(raised.value) and "params[" in str(raised.value)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert all(s.get("step", num_steps) == num_steps for s in optimizer.state.values())


def test_settings_may_be_changed_later_and_are_looked_at_again_only_then() -> None:
    from rowmuon.watch import GroupWatch

    params = make_params([(8, 4), (4,)])
    optimizer = rowmuon.PeriodicRowMuon([{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}], lr=0.02)
    train(optimizer, params, 1)
    for key, value in (("lr", 0.0), ("momentum", 0.5), ("period", [[0, 2]]), ("row_scale", 0.0), ("ns_steps", 3)):
        optimizer.param_groups[0][key] = value
        train(optimizer, params, 1)
    for key, value in (("betas", [0.8, 0.9]), ("eps", 0.0), ("lr", torch.tensor(0.1))):
        optimizer.param_groups[1][key] = value
        train(optimizer, params, 1)
    watch, looks = GroupWatch(), []

    class Counted(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            looks.append(key)
            return super().get(key, default)

    groups = [Counted(group) for group in optimizer.param_groups]
    for _ in range(3):
        watch.look(groups, optimizer.state)
    first = len(looks)
    watch.look(groups, optimizer.state)
    assert len(looks) - first == len(groups)  # its algorithm; all else is compared
