"""Every kind of step against the slow float64 reference in tests/reference/step.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rowmuon
from optimizer_cases import give_grads, make_params, relative_difference
from reference.step import AdamWSettings, MuonSettings, run

NUM_STEPS = 8
# float64 parameters and float64 Newton-Schulz: the same arithmetic in another order.
EXACT = 1e-10
# fp32 parameters and Newton-Schulz: rounding of 6e-8 an operation, at most 485 times at the steep start.
SINGLE = 1e-5
# bf16 Newton-Schulz of fp32 parameters: 2^-8 an operation; the iteration doesn't contract (as with torch.optim.Muon).
HALF = 0.02
# bf16 parameters as well: each of eight steps rounds gradient, momentum, direction and weight to 2^-9.
ALL_HALF = 0.03

PERIODS: dict[str, Any] = {
    "refresh": 1,
    "period 3": 3,
    "None": None,
    "schedule": ((0, 3), (4, 2)),
    "schedule with None": ((0, None), (5, 2)),
    "three segments": ((0, 1), (3, 2), (6, None)),
    "finish with Muon": ((0, 4), (6, 1)),
}
SHAPES = [(24, 16), (16, 24), (12, 12), (1, 8), (8, 1)]


def compare(
    shapes: Sequence[Sequence[int]],
    settings: Sequence[MuonSettings | AdamWSettings],
    *,
    dtype: torch.dtype = torch.float64,
    missing: Collection[tuple[int, int]] = (),
    size: float = 1.0,
    at_the_end: bool = False,
    **options: Any,
) -> float:
    """Relative difference of the whole update, after whichever of `NUM_STEPS` steps it is largest.

    The parameters are each in a group of their own. ``at_the_end``: only after the last step.
    """
    params = make_params(shapes, dtype=dtype)
    for parameter in params:
        parameter.data *= size
    start = [p.detach().clone() for p in params]
    optimizer = rowmuon.PeriodicRowMuon(
        [group_of(parameter, setting) for parameter, setting in zip(params, settings, strict=True)], **options
    )
    gradients, found = [], []
    for step in range(NUM_STEPS):
        give_grads(params, step)
        for i, parameter in enumerate(params):
            if (step, i) in missing:
                parameter.grad = None
        gradients.append([None if p.grad is None else as_array(p.grad) for p in params])
        for group, setting in zip(optimizer.param_groups, settings, strict=True):
            group["lr"] = setting.lr if isinstance(setting.lr, float) else setting.lr[step]
        optimizer.step()
        found.append([p.detach().clone() for p in params])
    expected = run([as_array(p) for p in start], gradients, settings)
    return max(
        relative_difference([p], [torch.from_numpy(e)], [s])
        for after, right in list(zip(found, expected, strict=True))[-1 if at_the_end else 0 :]
        for p, e, s in zip(after, right, start, strict=True)
        if not torch.equal(p, s) or not np.array_equal(e, as_array(s))  # nothing has moved it yet, here and there
    )


def as_array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy().copy()


def group_of(parameter: nn.Parameter, setting: MuonSettings | AdamWSettings) -> dict[str, Any]:
    group = dataclasses.asdict(setting)
    if isinstance(setting, AdamWSettings):
        group["algorithm"] = "adamw"
    else:
        group["ns_coefficients"] = group.pop("coefficients")
        for of_the_optimizer in ("cheap_step", "gram_decay", "gram_damping"):
            del group[of_the_optimizer]
    if not isinstance(setting.lr, float):
        group["lr"] = setting.lr[0]
    return {"params": [parameter], **group}


def exact(settings: MuonSettings, shapes: Sequence[Sequence[int]] = tuple(SHAPES), **options: Any) -> float:
    return compare(shapes, [settings] * len(shapes), ns_dtype=torch.float64, **options)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
@pytest.mark.parametrize("period", PERIODS.values(), ids=PERIODS)
def test_kinds_of_step(period: Any, adjust_lr_fn: str | None, nesterov: bool) -> None:
    settings = MuonSettings(lr=0.02, period=period, adjust_lr_fn=adjust_lr_fn, nesterov=nesterov)
    assert exact(settings) < EXACT


@pytest.mark.parametrize(
    "settings",
    [
        MuonSettings(row_scale=0.25),
        MuonSettings(row_scale=0.0),
        MuonSettings(weight_decay=0.0),
        MuonSettings(weight_decay=2.0, lr=0.1),
        MuonSettings(momentum=0.0),
        MuonSettings(momentum=0.5, maximize=True),
        MuonSettings(nesterov=False, maximize=True),
        MuonSettings(coefficients=rowmuon.COEFFICIENTS["polar_express"]),
        MuonSettings(coefficients=((2.0, -1.5, 0.5),) * 3),
        MuonSettings(lr=[0.02, 0.01, 0.03, 0.0, 0.02, 0.01, 0.005, 0.1]),
    ],
    ids=str,
)
def test_settings(settings: MuonSettings) -> None:
    assert exact(settings) < EXACT


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize(
    ("shape", "chunks", "stack_dims"),
    [
        ((24, 8), 3, None),
        ((48, 8), 6, None),
        ((3, 8, 12), 1, None),
        ((3, 12, 8), 2, None),
        ((8, 4, 3, 3), 1, None),
        ((8, 4, 3), 1, 0),
        ((2, 3, 8, 6), 2, 2),
        ((2, 6, 4, 2), 3, 1),
        ((6, 2, 2, 2, 2), 2, None),
    ],
    ids=str,
)
def test_views_as_matrices(shape: tuple[int, ...], chunks: int, stack_dims: int | None, adjust_lr_fn: str) -> None:
    settings = MuonSettings(lr=0.02, period=2, chunks=chunks, stack_dims=stack_dims, adjust_lr_fn=adjust_lr_fn)
    assert exact(settings, [shape]) < EXACT


def test_phases_of_a_staggered_run() -> None:
    params = make_params([(8, 8)] * 5 + [(16, 8)] * 2, dtype=torch.float64)
    start = [p.detach().clone() for p in params]
    settings = {"lr": 0.02, "ns_dtype": torch.float64, "period": 3, "stagger": True}
    optimizer = rowmuon.PeriodicRowMuon(params, **settings)
    phases = [optimizer.state[p]["phase"] for p in params]
    assert set(phases) == {0, 1, 2}
    gradients, kinds = [], []
    for step in range(NUM_STEPS):
        give_grads(params, step)
        gradients.append([as_array(p.grad) for p in params])
        kinds.append(optimizer.next_step_kind)
        optimizer.step()
    # phase p: step 0 with all the others, then p, p + 3, ...
    each = [MuonSettings(lr=0.02, period=((0, None), (p, 3)) if p else 3) for p in phases]
    expected = run([as_array(p) for p in start], gradients, each)[-1]
    assert relative_difference(params, map(torch.from_numpy, expected), start) < EXACT
    assert kinds == ["refresh"] + ["mixed"] * (NUM_STEPS - 1)


def test_groups_of_all_kinds_in_one_optimizer() -> None:
    shapes = [(24, 8), (8, 24), (3, 8, 8), (8, 4, 3, 3), (24, 8), (7,), (5, 5)]
    settings = [
        MuonSettings(lr=0.02, period=3, chunks=3),
        MuonSettings(lr=0.01, period=2, adjust_lr_fn="match_rms_adamw", row_scale=0.5),
        MuonSettings(lr=0.02, period=None),
        MuonSettings(lr=0.03, period=((0, 2), (3, 4)), nesterov=False),
        MuonSettings(lr=0.02, period=3, chunks=3, maximize=True),
        AdamWSettings(lr=1e-3),
        AdamWSettings(lr=3e-4, weight_decay=0.01, betas=(0.8, 0.99), eps=1e-6, maximize=True),
    ]
    assert compare(shapes, settings, ns_dtype=torch.float64) < EXACT
    # A small bound on a bucket cuts the stacks, and changes nothing.
    assert compare(shapes, settings, ns_dtype=torch.float64, bucket_bytes=1) < EXACT


def test_missing_gradients() -> None:
    settings = [MuonSettings(lr=0.02, period=3)] * 3 + [AdamWSettings(lr=1e-3)]
    missing = {(0, 0), (3, 0), (4, 0), (1, 1), (6, 1), (2, 2), (3, 2), (5, 3)}
    assert compare([(8, 8), (8, 8), (12, 4), (6,)], settings, ns_dtype=torch.float64, missing=missing) < EXACT


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize(
    ("dtype", "ns_dtype", "tolerance"),
    [
        (torch.float32, torch.float32, SINGLE),
        (torch.float32, torch.bfloat16, HALF),
        (torch.bfloat16, torch.bfloat16, ALL_HALF),
    ],
    ids=["fp32", "fp32 with bf16 Newton-Schulz", "bf16"],
)
def test_precisions(dtype: torch.dtype, ns_dtype: torch.dtype, tolerance: float, adjust_lr_fn: str) -> None:
    settings = [MuonSettings(lr=0.02, period=3, adjust_lr_fn=adjust_lr_fn)] * len(SHAPES)
    # Small weights, so that bf16 rounds them by far less than a step moves them. One orthogonalisation in bf16 is off
    # by more than eight steps together.
    at_the_end = ns_dtype == torch.bfloat16
    found = compare(SHAPES, settings, dtype=dtype, ns_dtype=ns_dtype, size=1 / 64, at_the_end=at_the_end)
    assert found < tolerance


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_matrix_of_several_blocks(nesterov: bool) -> None:
    settings = MuonSettings(lr=0.02, nesterov=nesterov, row_scale=0.5)
    assert exact(settings, [(130, 300), (300, 130)]) < EXACT
    assert compare([(130, 300)], [settings], dtype=torch.float32, ns_dtype=torch.float32, size=1 / 64) < SINGLE


def test_momentum_in_fp32_under_bf16_parameters() -> None:
    # A momentum of bf16 loses gradients that are small against it; the direction of fp32 doesn't.
    differences = {}
    for state_dtype in (None, torch.float32):
        params = make_params([(16, 16)], dtype=torch.bfloat16)
        optimizer = rowmuon.PeriodicRowMuon(params, lr=0.02, state_dtype=state_dtype, period=3)
        momentum = optimizer.state[params[0]]["momentum_buffer"]
        exact_momentum = np.zeros((16, 16))
        for step in range(40):
            give_grads(params, step)
            exact_momentum = 0.95 * exact_momentum + 0.05 * as_array(params[0].grad)
            optimizer.step()
        assert momentum.dtype == (state_dtype or torch.bfloat16)
        differences[state_dtype] = float(np.linalg.norm(as_array(momentum) - exact_momentum))
    assert differences[torch.float32] < 1e-5 * np.linalg.norm(exact_momentum)
    assert differences[None] > 100 * differences[torch.float32]


def test_the_comparison_sees_a_wrong_step() -> None:
    for wrong in (
        MuonSettings(lr=0.02, period=4),
        MuonSettings(lr=0.02, row_scale=0.99),
        MuonSettings(lr=0.02, weight_decay=0.101),
        MuonSettings(lr=0.02, momentum=0.949),
    ):
        params, others = make_params([(8, 8)], dtype=torch.float64), make_params([(8, 8)], dtype=torch.float64)
        start = [p.detach().clone() for p in params]
        settings = [MuonSettings(lr=0.02), wrong]
        optimizers = [
            rowmuon.PeriodicRowMuon([group_of(p[0], s)], ns_dtype=torch.float64)
            for p, s in zip((params, others), settings, strict=True)
        ]
        for step in range(NUM_STEPS):
            for p, optimizer in zip((params, others), optimizers, strict=True):
                give_grads(p, step)
                optimizer.step()
        assert relative_difference(others, params, start) > 1e4 * EXACT
