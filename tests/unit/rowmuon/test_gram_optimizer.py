"""``cheap_step="gram_row"`` on one process: against the float64 reference, its state, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.flop_counter import FlopCounterMode

import rowmuon
from optimizer_cases import assert_equal, copies, give_grads, make_params, relative_difference, train
from reference.step import MuonSettings, run
from rowmuon import gram
from rowmuon.factors import gram_block
from rowmuon.layout import local_layout
from rowmuon.packing import packed_columns

NUM_STEPS = 8
# (shape, chunks): tall, a fused one, square, wide in two blocks, wide with chunks in four, wide in one, a convolution
PARAMETERS: list[tuple[tuple[int, ...], int]] = [
    ((24, 8), 1),
    ((24, 8), 3),
    ((8, 8), 1),
    ((8, 16), 1),
    ((8, 16), 2),
    ((6, 16), 1),
    ((6, 2, 2, 2), 1),
]


def build(params: list[nn.Parameter], chunks: list[int] | None = None, **settings: Any) -> rowmuon.PeriodicRowMuon:
    chunks = chunks or [1] * len(params)
    groups = [{"params": [p], "chunks": c} for p, c in zip(params, chunks, strict=True)]
    return rowmuon.PeriodicRowMuon(groups, **{"lr": 0.02, "period": 3, "cheap_step": "gram_row", **settings})


def compare(
    settings: dict[str, Any], missing: tuple[int, ...] = (), dtype: torch.dtype = torch.float64, **options: Any
) -> float:
    """Relative difference of the whole update, of the parameter and after the step where it is largest."""
    params = make_params([shape for shape, _ in PARAMETERS], dtype=dtype)
    chunks = [chunks for _, chunks in PARAMETERS]
    start = copies(params)
    optimizer = build(params, chunks, **settings, **options)
    gradients, found = [], []
    for step in range(NUM_STEPS):
        give_grads(params, step)
        if step in missing:
            params[0].grad = None
        gradients.append([None if p.grad is None else p.grad.double().numpy() for p in params])
        optimizer.step()
        found.append(copies(params))
    wanted = [MuonSettings(chunks=c, cheap_step="gram_row", **{"lr": 0.02, **settings}) for c in chunks]
    expected = run([p.double().numpy() for p in start], gradients, wanted)
    return max(
        relative_difference([p], [torch.from_numpy(e)], [s])
        for after, right in zip(found, expected, strict=True)
        for p, e, s in zip(after, right, start, strict=True)
        if not torch.equal(p, s)
    )


SETTINGS: list[dict[str, Any]] = [
    {},
    {"nesterov": False},
    {"maximize": True},
    {"adjust_lr_fn": "match_rms_adamw", "row_scale": 0.5},
    {"gram_decay": 0.0, "gram_damping": 1e-1},
    {"gram_decay": 0.95, "gram_damping": 1e-4, "period": 2},
    {"period": ((0, 3), (4, 2))},
    {"momentum": 0.0, "weight_decay": 0.0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_it_is_the_reference(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """With as many power iterations as it takes, for the reference has the exact eigenvalue."""
    monkeypatch.setattr(gram, "_NUM_POWERS", 1000)
    assert compare(settings, ns_dtype=torch.float64) < 1e-7


def test_rounding_and_the_estimate_of_the_eigenvalue() -> None:
    assert compare({}, ns_dtype=torch.float64) < 2e-3
    assert compare({}, dtype=torch.float32, ns_dtype=torch.float32) < 2e-3
    assert compare({}, dtype=torch.float32) < 0.03  # bf16 Newton-Schulz and products


def test_a_missing_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "_NUM_POWERS", 1000)
    assert compare({}, missing=(0, 4), ns_dtype=torch.float64) < 1e-7
    assert compare({}, missing=(3, 5), ns_dtype=torch.float64) < 1e-7


def test_it_differs_from_the_row_step_between_refreshes_only() -> None:
    results = []
    for cheap_step in ("row", "gram_row"):
        params = make_params([(12, 8)])
        optimizer = build(params, cheap_step=cheap_step)
        results.append([copies(params) for _ in range(4) if train(optimizer, params, 1)])
    assert_equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][1][0], results[1][1][0])


def test_columns_that_have_a_gram_matrix_of_their_own() -> None:
    for (shape, chunks), expected in zip(PARAMETERS, (8, 8, 8, 8, 4, 16, 8), strict=True):
        assert gram_block(local_layout(shape, stack_dims=0, chunks=chunks)) == expected
    params = make_params([shape for shape, _ in PARAMETERS])
    optimizer = build(params, [chunks for _, chunks in PARAMETERS])
    for parameter, size in zip(params, ((1, 8), (1, 8), (1, 8), (2, 8), (4, 4), (1, 16), (1, 8)), strict=True):
        state = optimizer.state[parameter]
        assert state["gram_factor"].shape == (*size, size[-1])
        assert state["gram_ema"].shape == (size[0] * size[1], packed_columns(size[1]))
        assert state["gram_ema"].dtype == torch.float32 and state["gram_factor"].dtype == torch.bfloat16


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_size_of_gradients_changes_nothing(size: float) -> None:
    """At a refresh; a row step of squares that overflow is none, with U Q as with U."""
    states = []
    for scale in (1.0, size):
        params = make_params([(12, 8)])
        optimizer = build(params, ns_dtype=torch.float32)
        give_grads(params, 0, scale)
        optimizer.step()
        states.append(optimizer.state[params[0]])
    for key in ("gram_ema", "gram_factor"):
        torch.testing.assert_close(states[0][key], states[1][key], rtol=1e-4, atol=1e-5)


def test_a_momentum_of_zeros_leaves_the_mean_as_it_is() -> None:
    """adaLN-zero: the first gradients are exactly zero. Until there is a mean the step is the row step."""
    params, others = make_params([(12, 8)]), make_params([(12, 8)])
    optimizer, rows = build(params, ns_dtype=torch.float32), build(others, cheap_step="row", ns_dtype=torch.float32)
    for step in range(5):
        give_grads([*params, *others], step)
        for parameter, other in zip(params, others, strict=True):
            other.grad = parameter.grad = parameter.grad * (step > 0)
        optimizer.step()
        rows.step()
        assert bool(params[0].isfinite().all())
        if step < 3:
            torch.testing.assert_close(params[0], others[0], rtol=1e-5, atol=1e-6)
    ema = optimizer.state[params[0]]["gram_ema"]
    torch.testing.assert_close(ema[:, 0].sum(), torch.ones(()))  # its diagonal
    assert not torch.allclose(params[0], others[0], rtol=1e-5, atol=1e-6)


def test_a_skipped_step_changes_nothing() -> None:
    params = make_params([(12, 8)])
    optimizer = build(params, skip_nonfinite=True)
    train(optimizer, params, 3)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    give_grads(params, 3)
    params[0].grad[0, 0] = torch.nan
    optimizer.step()
    assert optimizer.num_skipped_steps == 1 and optimizer.next_step_kind == "refresh"
    for key, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, before[0][key]) if isinstance(value, Tensor) else value == before[0][key]


# ------------------------------------------------------------------------------------------------------ state dicts
ROUND_TRIPS = {
    "copied": lambda state: copy.deepcopy(state),
    "on disk": lambda state: _through_a_file(state),
}


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("saved_at", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ROUND_TRIPS)
def test_a_resumed_run_is_bit_equal(way: str, dtype: torch.dtype, saved_at: int) -> None:
    shapes, chunks = [(24, 8), (8, 16), (8, 8)], [3, 1, 1]
    params = make_params(shapes, dtype=dtype)
    optimizer = build(params, chunks, stagger=True)
    train(optimizer, params, saved_at)
    other = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = build(other, chunks, stagger=True)
    resumed.load_state_dict(ROUND_TRIPS[way](optimizer.state_dict()))
    assert train(optimizer, params, 5, start=saved_at) == train(resumed, other, 5, start=saved_at)
    assert_equal(other, params)


def test_copies_and_pickles_go_on_bit_equal() -> None:
    params = make_params([(24, 8), (8, 16)])
    optimizer = build(params)
    train(optimizer, params, 2)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        others = [p for group in other.param_groups for p in group["params"]]
        train(other, others, 3, start=2)
        expected = copy.deepcopy(optimizer)
        wanted = [p for group in expected.param_groups for p in group["params"]]
        train(expected, wanted, 3, start=2)
        assert_equal(others, wanted)


def test_a_checkpoint_without_a_mean_is_followed_by_a_refresh() -> None:
    """Then the period goes on as it was."""
    params = make_params([(12, 8)])
    rows = build(params, cheap_step="row")
    train(rows, params, 4)
    optimizer = build(params)
    optimizer.load_state_dict(rows.state_dict())
    assert train(optimizer, params, 5, start=4) == ["refresh", "row", "refresh", "row", "row"]
    assert optimizer.state[params[0]]["num_grams"] == 2


def test_a_dcp_checkpoint_without_a_mean_is_followed_by_a_refresh(tmp_path: Path) -> None:
    """As docs/resume.md says it is loaded."""
    model = nn.Linear(8, 12, bias=False)
    rows = build(list(model.parameters()), cheap_step="row")
    train(rows, list(model.parameters()), 4)
    dcp.save({"optimizer": get_optimizer_state_dict(model, rows)}, checkpoint_id=tmp_path, no_dist=True)
    optimizer = build(list(model.parameters()))
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert train(optimizer, list(model.parameters()), 4, start=4) == ["refresh", "row", "refresh", "row"]


def test_one_that_has_it_loads_without_it_where_it_is_off() -> None:
    params = make_params([(12, 8)])
    optimizer = build(params)
    train(optimizer, params, 4)
    saved = optimizer.state_dict()
    rows = build(params, cheap_step="row")
    rows.load_state_dict(saved)
    assert set(rows.state[params[0]]) == {"momentum_buffer", "step", "phase"}
    assert "gram_ema" in saved["state"][0]  # the caller's
    assert train(rows, params, 3, start=4) == ["row", "row", "refresh"]


def test_another_ns_dtype_and_blocks_of_another_size() -> None:
    params = make_params([(8, 16)])
    optimizer = build(params)
    train(optimizer, params, 2)
    double = build(params, ns_dtype=torch.float64)
    double.load_state_dict(optimizer.state_dict())
    assert double.state[params[0]]["gram_factor"].dtype == torch.float64
    assert double.next_step_kind == "row"
    saved = optimizer.state_dict()
    saved["state"][0]["gram_ema"] = torch.zeros(16, 9)
    optimizer.load_state_dict(saved)
    assert optimizer.next_step_kind == "refresh"


def test_loading_takes_copies() -> None:
    params = make_params([(8, 8)])
    optimizer = build(params)
    train(optimizer, params, 1)
    saved = optimizer.state_dict()
    kept = saved["state"][0]["gram_factor"].clone()
    other = build(make_params([(8, 8)]))
    other.load_state_dict(saved)
    train(other, other.param_groups[0]["params"], 4)
    assert torch.equal(saved["state"][0]["gram_factor"], kept)


def test_an_added_group() -> None:
    params = make_params([(12, 8), (8, 8)])
    optimizer = build(params[:1])
    train(optimizer, params[:1], 2)
    optimizer.add_param_group({"params": params[1:]})
    assert train(optimizer, params, 3) == ["mixed", "mixed", "row"]
    assert [optimizer.state[p]["num_grams"] for p in params] == [2, 1]


# ----------------------------------------------------------------------------------------------- options and refusals
def test_compiled_is_the_same() -> None:
    """The product and what follows are eager; nothing takes the plain row step instead."""
    results = []
    for compile in (False, True):
        params = make_params([(12, 8), (8, 16)])
        train(build(params, compile=compile), params, 5)
        results.append(params)
    assert_equal(*results)


def test_a_stack_takes_row_steps_and_describe_says_so() -> None:
    params, others = make_params([(3, 8, 8), (12, 8)]), make_params([(3, 8, 8)])
    optimizer, rows = build(params), build(others, cheap_step="row")
    train(optimizer, params, 3)
    train(rows, others, 3)
    assert_equal(params[:1], others)
    text = optimizer.describe()
    assert "row steps: it is a stack of matrices" in text
    assert "Gram row steps, 1 of 8x8" in text
    assert f"{optimizer.plan('row').gram_state_bytes(0):,} bytes" in text and "gram_damping=0.001" in text
    assert "gram" not in rows.describe().lower()


@pytest.mark.parametrize("period", [None, ((0, 3), (10, None))])
def test_a_period_without_end_is_refused(period: Any) -> None:
    params = make_params([(8, 8)])
    with pytest.raises(ValueError, match=r"period=.*None.*cheap_step"):
        build(params, period=period)
    optimizer = build(params)
    with pytest.raises(ValueError, match="cheap_step"):
        optimizer.add_param_group({"params": make_params([(4, 4)]), "period": period})
    saved = optimizer.state_dict()
    saved["param_groups"][0]["period"] = period
    with pytest.raises(ValueError, match="the state dict with cheap_step"):
        optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["period"] = period
    give_grads(params, 0)
    with pytest.raises(ValueError, match="cheap_step"):
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cheap_step": "gram"}, "cheap_step='gram' is neither 'row' nor 'gram_row'"),
        ({"gram_decay": 1.0}, r"gram_decay=1.0 isn't a number in \[0, 1\)"),
        ({"gram_decay": True}, "gram_decay=True"),
        ({"gram_damping": 0.0}, "gram_damping=0.0 isn't a finite number >= 1e-05"),
        ({"gram_damping": float("nan")}, "gram_damping=nan"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(make_params([(8, 8)]), **settings)


def test_muon_has_no_cheap_step() -> None:
    with pytest.raises(TypeError, match="Muon takes no cheap_step"):
        rowmuon.Muon(make_params([(8, 8)]), cheap_step="gram_row")


# ------------------------------------------------------------------------------------------------------------ counts
@pytest.mark.parametrize("bucket_bytes", [1, 1000, 64 << 20])
def test_flops_are_the_plans(bucket_bytes: int) -> None:
    params = make_params([shape for shape, _ in PARAMETERS])
    optimizer = build(params, [chunks for _, chunks in PARAMETERS], bucket_bytes=bucket_bytes)
    for step, kind in enumerate(("refresh", "row")):
        give_grads(params, step)
        plan = optimizer.plan(kind)  # type: ignore[arg-type]
        assert plan.gram_state_bytes(0) == sum(
            state[key].nbytes for state in optimizer.state.values() for key in ("gram_ema", "gram_factor")
        )
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        assert counter.get_total_flops() == plan.num_flops(0)
        assert plan.num_collectives(0) == 0
