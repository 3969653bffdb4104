"""What ``torch.optim.Optimizer`` promises: closures, hooks, groups, copies, freezing, kinds of parameters."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import rowmuon
from optimizer_cases import (
    assert_equal,
    copies,
    give_grads,
    make_params,
    mixed_groups,
    mixed_optimizer,
    momentum_of,
    relative_difference,
    train,
)
from rowmuon.watch import MOST_EMPTY_STEPS

SHAPES = [(8, 8), (16, 4), (2, 4, 6), (8, 4, 3, 3), (5,)]


# ---------------------------------------------------------------------------------------------------- step and hooks
def test_closure_runs_once_with_gradients_enabled() -> None:
    model = nn.Linear(4, 3, bias=False)
    optimizer = rowmuon.PeriodicRowMuon(model.parameters(), lr=0.02)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    before = copies(model.parameters())
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() == pytest.approx((torch.ones(2, 4) @ before[0].T).square().sum().item())
    assert not torch.equal(model.weight, before[0])
    assert optimizer.step() is None


def test_step_hooks() -> None:
    params = make_params(SHAPES)
    optimizer = mixed_optimizer(params)
    seen = []
    pre = optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append(("pre", opt.state[params[0]]["step"])))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append(("post", opt.state[params[0]]["step"])))
    train(optimizer, params, 1)
    assert seen == [("pre", 0), ("post", 1)]
    pre.remove()
    train(optimizer, params, 1)
    assert seen[2:] == [("post", 2)]


def test_state_dict_hooks() -> None:
    params = make_params(SHAPES)
    optimizer = mixed_optimizer(params)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda opt, state_dict: {**state_dict, "note": "kept"})
    saved = optimizer.state_dict()
    assert seen == ["pre"] and saved["note"] == "kept"
    steps_seen = []

    def rename(opt: torch.optim.Optimizer, state_dict: dict) -> dict:
        return {**state_dict, "param_groups": state_dict["groups_under_another_name"]}

    optimizer.register_load_state_dict_pre_hook(rename)  # the caller's hook comes before our own reading
    optimizer.register_load_state_dict_post_hook(lambda opt: steps_seen.append(opt.state[params[0]]["momentum_buffer"]))
    saved["groups_under_another_name"] = saved.pop("param_groups")
    optimizer.load_state_dict(saved)
    assert isinstance(steps_seen[0], torch.Tensor)
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    params = make_params(SHAPES)
    optimizer = mixed_optimizer(params)
    give_grads(params, 0)
    optimizer.zero_grad(set_to_none=set_to_none)
    assert all((p.grad is None) if set_to_none else not p.grad.any() for p in params)


def test_a_compiled_training_step_leaves_the_optimizer_out() -> None:
    compiled, eager = make_params(SHAPES), make_params(SHAPES)
    optimizer, reference = mixed_optimizer(compiled, skip_nonfinite=True), mixed_optimizer(eager, skip_nonfinite=True)

    @torch.compile(backend="eager")
    def training_step() -> torch.Tensor:
        loss = sum(p.square().sum() for p in compiled)
        optimizer.step()
        return loss + 1

    stepped = torch.compile(optimizer.step, backend="eager")
    for step, take in enumerate((training_step, training_step, stepped, stepped, optimizer.step)):
        give_grads(compiled, step)
        give_grads(eager, step)
        take()
        reference.step()
    assert_equal(compiled, eager)


SURROUNDINGS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "another default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("surrounding", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_what_surrounds_a_step_changes_nothing(surrounding: Callable[[], contextlib.AbstractContextManager]) -> None:
    # Autocast would take Newton-Schulz to bf16, which is asked for in fp32.
    within, outside = make_params(SHAPES), make_params(SHAPES)
    settings = {"period": 2, "skip_nonfinite": True, "ns_dtype": torch.float32}
    optimizer, reference = mixed_optimizer(within, **settings), mixed_optimizer(outside, **settings)
    for step in range(4):
        give_grads(within, step)
        give_grads(outside, step)
        with surrounding():
            optimizer.step()
        reference.step()
    assert_equal(within, outside)


# ------------------------------------------------------------------------------------------------------------ groups
def test_an_added_group_starts_with_a_refresh_and_counts_its_own_steps() -> None:
    first, late = make_params([(8, 8)]), make_params([(6, 6)], seed=1)
    optimizer = rowmuon.PeriodicRowMuon(first, lr=0.02, period=3)
    assert train(optimizer, first, 2) == ["refresh", "row"]
    optimizer.add_param_group({"params": late, "lr": 0.01})
    alone = rowmuon.PeriodicRowMuon(late_copy := make_params([(6, 6)], seed=1), lr=0.01, period=3)
    kinds = []
    for step in range(5):
        give_grads(first, 2 + step)
        give_grads(late, step)
        give_grads(late_copy, step)
        kinds.append(optimizer.next_step_kind)
        optimizer.step()
        alone.step()
        assert_equal(late, late_copy)
    assert kinds == ["mixed", "mixed", "row", "mixed", "mixed"]  # first: steps 2 3 4 5 6; late: 0 1 2 3 4
    assert [optimizer.state[p]["step"] for p in (*first, *late)] == [7, 5]


def test_an_added_group_doesnt_disturb_the_callers_dict() -> None:
    optimizer = rowmuon.PeriodicRowMuon(make_params([(8, 8)]), lr=0.02)
    group = {"params": make_params([(4, 4)]), "lr": 0.5}
    keys = set(group)
    optimizer.add_param_group(group)
    assert set(group) == keys


def test_a_refused_group_leaves_the_optimizer_as_it_was() -> None:
    params = make_params([(8, 8), (8, 8)])
    optimizer = rowmuon.PeriodicRowMuon([{"params": params[:1]}, {"params": params[1:]}], lr=0.02)
    for bad, error in (({"params": make_params([(8,)])}, "needs matrices"), ({"params": params[:1]}, "more than one")):
        with pytest.raises(ValueError, match=error):
            optimizer.add_param_group(bad)
    assert len(optimizer.param_groups) == 2
    assert set(optimizer.state) == set(params)
    train(optimizer, params, 2)


def test_named_parameters_and_generators() -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False))
    named = rowmuon.PeriodicRowMuon(model.named_parameters(), lr=0.02)
    assert named.param_groups[0]["param_names"] == ["0.weight", "1.weight"]
    assert "0.weight" in named.describe()
    generated = rowmuon.PeriodicRowMuon((p for p in model.parameters()), lr=0.02)
    assert generated.param_groups[0]["params"] == list(model.parameters())
    grouped = rowmuon.PeriodicRowMuon([{"params": (p for p in model.parameters())}], lr=0.02)
    assert grouped.param_groups[0]["params"] == list(model.parameters())
    single = rowmuon.PeriodicRowMuon([{"params": model[0].weight}], lr=0.02)
    assert single.param_groups[0]["params"] == [model[0].weight]


def test_empty_lists_and_duplicates() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        rowmuon.PeriodicRowMuon([])
    with pytest.raises(TypeError, match="iterable of Tensors"):
        rowmuon.PeriodicRowMuon(make_params([(4, 4)])[0])
    with pytest.raises(TypeError, match="ordered collections"):
        rowmuon.PeriodicRowMuon([{"params": set(make_params([(4, 4)]))}])
    (parameter,) = make_params([(4, 4)])
    with pytest.raises(ValueError, match="more than one parameter group"):
        rowmuon.PeriodicRowMuon([{"params": [parameter]}, {"params": [parameter]}])
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match=r"'a' occurs more than once"):
        rowmuon.PeriodicRowMuon([("a", parameter), ("b", parameter)])
    # torch allows a group without parameters
    optimizer = rowmuon.PeriodicRowMuon([{"params": []}, {"params": [parameter]}], lr=0.02, skip_nonfinite=True)
    assert train(optimizer, [parameter], 2) == ["refresh", "row"]


def test_tied_parameters_are_stepped_once() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model[1].weight = model[0].weight
    groups = rowmuon.param_groups(model, [rowmuon.Rule(".*", "muon")])
    optimizer = rowmuon.PeriodicRowMuon(groups, lr=0.02, period=1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert optimizer.traffic["refresh"].num_orthogonalizations == 1
    torch.testing.assert_close(momentum_of(optimizer, model[0].weight), 0.05 * model[0].weight.grad)


# ------------------------------------------------------------------------------------------- missing, frozen, maximize
@pytest.mark.parametrize("period", [1, 3, None])
def test_a_missing_gradient_leaves_its_parameter_as_it_is(period: int | None) -> None:
    params = make_params([(8, 8), (8, 8), (5,)])
    alone = make_params([(8, 8), (8, 8), (5,)])
    optimizer, reference = mixed_optimizer(params, period=period), mixed_optimizer(alone[:1] + alone[2:], period=period)
    for step in range(4):
        give_grads(params, step)
        give_grads(alone, step)
        params[1].grad = None
        optimizer.step()
        reference.step()
    assert_equal([params[0], params[2]], [alone[0], alone[2]])
    assert torch.equal(params[1], alone[1])
    assert not momentum_of(optimizer, params[1]).any()
    # Whether a gradient is there is one rank's knowledge, so the step counts all the same.
    assert optimizer.state[params[1]]["step"] == 4


def test_no_gradient_at_all() -> None:
    params = make_params(SHAPES)
    optimizer = mixed_optimizer(params, period=2, skip_nonfinite=True)
    start = copies(params)
    with pytest.warns(RuntimeWarning, match="none of this optimizer's 5 trainable parameters") as caught:
        optimizer.step()
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        for _ in range(MOST_EMPTY_STEPS - 2):
            optimizer.step()
    assert_equal(params, start)
    with pytest.raises(RuntimeError, match=r"after 10 steps, none of .* after everything that replaces parameters"):
        optimizer.step()


def test_an_optimizer_of_parameters_that_have_been_replaced_says_so() -> None:
    layer = nn.Linear(4, 4, bias=False)
    optimizer = rowmuon.PeriodicRowMuon(layer.parameters())
    layer.weight = nn.Parameter(layer.weight.detach().clone())  # as fully_shard does
    layer(torch.ones(1, 4)).sum().backward()
    with pytest.warns(RuntimeWarning, match="fully_shard"):
        optimizer.step()


def test_gradients_that_come_late_or_stop_are_no_fault() -> None:
    params = make_params([(8, 8), (6, 6)])
    for parameter in params:
        parameter.requires_grad_(False)
    optimizer = mixed_optimizer(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(MOST_EMPTY_STEPS + 1):
            optimizer.step()  # all are frozen, for now
        params[1].requires_grad_(True)
        train(optimizer, params[1:], 1)
        params[1].grad = None
        for _ in range(MOST_EMPTY_STEPS + 1):
            optimizer.step()


def test_freezing_and_unfreezing() -> None:
    params = make_params([(8, 8), (6, 6), (5,)])
    optimizer = mixed_optimizer(params)
    train(optimizer, params, 1)
    for parameter in params[1:]:
        parameter.requires_grad_(False)
    frozen, momentum = copies(params[1:]), copies([momentum_of(optimizer, params[1])])
    assert train(optimizer, params, 2, start=1) == ["row", "row"]
    assert_equal(params[1:], frozen)
    assert_equal([momentum_of(optimizer, params[1])], momentum)
    assert "frozen" in optimizer.describe()
    for parameter in params[1:]:
        parameter.requires_grad_(True)
    # Frozen, it didn't count: it goes on from its own step 1 while the other one is at 3.
    assert [optimizer.state[p]["step"] for p in params[:2]] == [3, 1]
    assert train(optimizer, params, 3, start=3) == ["mixed", "row", "mixed"]
    assert all(not torch.equal(a, b) for a, b in zip(params[1:], frozen, strict=True))


@pytest.mark.parametrize("period", [1, None])
def test_maximize_is_the_negated_gradient(period: int | None) -> None:
    up, down = make_params(SHAPES), make_params(SHAPES)
    climb, descend = (mixed_optimizer(p, period=period, maximize=m) for p, m in ((up, True), (down, False)))
    for step in range(3):
        give_grads(up, step)
        give_grads(down, step, scale=-1.0)
        climb.step()
        descend.step()
    assert_equal(up, down)


# ------------------------------------------------------------------------------------------------------------ copies
def test_deepcopy_and_pickle_continue_bit_equal() -> None:
    params = make_params(SHAPES)
    optimizer = mixed_optimizer(params, stagger=True, row_scale=0.5, skip_nonfinite=True)
    train(optimizer, params, 4)
    copied_params, copied = copy.deepcopy((params, optimizer))
    pickled_params, pickled = pickle.loads(pickle.dumps((params, optimizer)))
    before = copies(params)
    for others, other in ((copied_params, copied), (pickled_params, pickled)):
        assert other.param_groups[0]["params"][0] is others[0]
        assert (other.options, other.stagger, other.skip_nonfinite) == (optimizer.options, True, True)
        assert other.traffic == optimizer.traffic
    kinds = train(copied, copied_params, 5, start=4)
    assert_equal(params, before)  # the copy has its own tensors
    assert train(pickled, pickled_params, 5, start=4) == kinds
    assert train(optimizer, params, 5, start=4) == kinds
    assert_equal(copied_params, params)
    assert_equal(pickled_params, params)


def test_muon_survives_pickling() -> None:
    params = make_params([(8, 8)])
    optimizer = rowmuon.Muon(params, lr=0.02)
    restored = pickle.loads(pickle.dumps(optimizer))
    assert type(restored) is rowmuon.Muon
    assert train(restored, restored.param_groups[0]["params"], 3) == ["refresh"] * 3


def test_a_copy_under_a_scheduler_steps_itself() -> None:
    # A scheduler puts its own `step` over the optimizer's; carried along, the copy would step the original.
    params = make_params(SHAPES)
    optimizer = mixed_optimizer(params)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.register_step_pre_hook(lambda *_: None)  # neither can be pickled
    start = copies(params)
    for others, other in (copy.deepcopy((params, optimizer)), pickle.loads(pickle.dumps((params, optimizer)))):
        train(other, others, 1)
        assert relative_difference(others, start, [torch.zeros_like(p) for p in start]) > 0
        assert_equal(params, start)


# ---------------------------------------------------------------------------------------------------- memory layouts
@pytest.mark.parametrize("period", [1, None], ids=["refresh", "row"])
@pytest.mark.parametrize("kind", ["channels_last", "transposed", "transposed stack", "slice", "chunks"])
def test_any_strides(kind: str, period: int | None) -> None:
    chunks = 1
    if kind == "channels_last":
        (plain,) = make_params([(8, 4, 3, 3)])
        strided = nn.Parameter(plain.detach().clone().contiguous(memory_format=torch.channels_last))
    elif kind == "slice":
        (plain,) = make_params([(6, 8)])
        storage = torch.zeros(12, 16)
        storage[::2, ::2] = plain.detach()
        strided = nn.Parameter(storage[::2, ::2])
    else:
        shape = (3, 4, 6) if kind == "transposed stack" else (8, 6)
        chunks = 2 if kind == "chunks" else 1
        (plain,) = make_params([shape])
        strided = nn.Parameter(plain.detach().transpose(-1, -2).contiguous().transpose(-1, -2))
    assert not strided.is_contiguous()
    strides, start = strided.stride(), plain.detach().clone()
    settings = {"lr": 0.02, "period": period, "ns_dtype": torch.float32}
    pair = [rowmuon.PeriodicRowMuon([{"params": [p], "chunks": chunks}], **settings) for p in (plain, strided)]
    for step in range(3):
        for optimizer, parameter in zip(pair, (plain, strided), strict=True):
            give_grads([parameter], step)
            if step == 1:  # a gradient may be strided too
                parameter.grad = parameter.grad.transpose(0, 1).contiguous().transpose(0, 1)
            optimizer.step()
    assert strided.stride() == strides
    assert relative_difference([strided], [plain], [start]) < 1e-5
    torch.testing.assert_close(momentum_of(pair[1], strided), momentum_of(pair[0], plain))


def test_mixed_groups_helper_routes_by_ndim() -> None:
    assert [group["algorithm"] for group in mixed_groups(make_params(SHAPES))] == ["muon", "adamw"]


def test_phase_is_entered_around_each_part_of_a_step_and_never_nests() -> None:
    params = make_params([(8, 6), (6, 6), (3,)])
    opt = mixed_optimizer(params, period=2)
    seen: list[list[str]] = []
    inside = []

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        assert not inside, f"{name} within {inside}"
        inside.append(name)
        seen[-1].append(name)
        yield
        inside.pop()

    opt.phase = phase
    for step in range(2):
        seen.append([])
        give_grads(params, step)
        opt.step()
    assert set(seen[0]) == {"gather", "newton_schulz", "adamw", "row_step"}
    assert "newton_schulz" not in seen[1] and {"row_step", "adamw"} <= set(seen[1])
    copied = copy.deepcopy(opt)
    give_grads([p for group in copied.param_groups for p in group["params"]], 2)
    copied.step()  # a stop-watch belongs to one optimizer
    assert len(seen) == 2 and pickle.loads(pickle.dumps(opt)).phase is contextlib.nullcontext
