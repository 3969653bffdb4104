"""The optimizer against the slow float64 reference: every kind of step, several groups at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import rowmuon
from reference.step import AdamWSettings, MuonSettings, Settings, run
from rowmuon.orthogonalize import resolve_coefficients

NUM_STEPS = 9


def gaussian(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def options(setting: Settings) -> dict[str, object]:
    """The optimizer's group for a setting of the reference."""
    if isinstance(setting, AdamWSettings):
        return {"algorithm": "adamw", "betas": setting.betas, "eps": setting.eps}
    period = setting.period if setting.period is None or isinstance(setting.period, int) else tuple(setting.period)
    return {
        "algorithm": "muon", "momentum": setting.momentum, "nesterov": setting.nesterov, "period": period,
        "adjust_lr_fn": setting.adjust_lr_fn, "row_scale": setting.row_scale, "chunks": setting.chunks,
        "ns_coefficients": tuple(setting.coefficients), "ns_steps": len(setting.coefficients),
    }  # fmt: skip


def check(cases: list[tuple[tuple[int, ...], Settings]], dtype: torch.dtype, tolerance: float, missing=()) -> None:
    """Relative difference of each parameter's whole update after every step.

    Args:
        cases: (shape, settings), a parameter and a group each.
        missing: (step, parameter) whose gradient isn't there.
    """
    starts = [gaussian(shape, seed=100 + i) for i, (shape, _) in enumerate(cases)]
    # Tensors of dtype are what both begin with, so that only the steps differ.
    parameters = [torch.nn.Parameter(start.to(dtype)) for start in starts]
    starts = [parameter.detach().double().clone() for parameter in parameters]
    gradients: list[list[np.ndarray | None]] = []
    for step in range(NUM_STEPS):
        row = [gaussian(shape, seed=1000 * step + i).to(dtype).double().numpy() for i, (shape, _) in enumerate(cases)]
        gradients.append([None if (step, i) in missing else grad for i, grad in enumerate(row)])
    expected = run([start.numpy() for start in starts], gradients, [setting for _, setting in cases])

    groups = []
    for parameter, (_, setting) in zip(parameters, cases, strict=True):
        lr = setting.lr if isinstance(setting.lr, float) else setting.lr[0]
        common = {"lr": lr, "weight_decay": setting.weight_decay, "maximize": setting.maximize}
        groups.append({"params": [parameter], **common, **options(setting)})
    optimizer = rowmuon.PeriodicRowMuon(groups, ns_dtype=dtype)
    for step in range(NUM_STEPS):
        for i, (parameter, group, (_, setting)) in enumerate(
            zip(parameters, optimizer.param_groups, cases, strict=True)
        ):
            grad = gradients[step][i]
            parameter.grad = None if grad is None else torch.from_numpy(grad).to(dtype)
            group["lr"] = setting.lr if isinstance(setting.lr, float) else setting.lr[step]
        optimizer.step()
        for i, (parameter, start) in enumerate(zip(parameters, starts, strict=True)):
            exact = torch.from_numpy(expected[step][i]) - start
            difference = float((parameter.detach().double() - start - exact).norm())
            assert difference <= tolerance * float(exact.norm()), (step, *cases[i])


# float64: a few roundings at 1e-16, enlarged by five quintics. fp32: the same at 6e-8, over steps of 1 % of the weight.
DTYPES = {"float64": (torch.float64, 1e-11), "float32": (torch.float32, 2e-4)}
SHAPES = {"wide": (12, 40), "tall": (40, 12), "square": (20, 20), "row": (1, 30), "column": (30, 1), "long": (130, 300)}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("convention", [None, "original", "match_rms_adamw"])
def test_shapes_conventions_and_nesterov(convention, nesterov, dtype) -> None:
    setting = MuonSettings(lr=0.02, nesterov=nesterov, adjust_lr_fn=convention, row_scale=0.5)
    check([(shape, setting) for shape in SHAPES.values()], *dtype)


@pytest.mark.parametrize(
    "period", [1, 2, 3, 4, None, ((0, 3), (4, 1)), ((0, 1), (3, 2), (6, None)), ((0, None), (5, 3))]
)
def test_periods_and_schedules(period) -> None:
    check([((12, 20), MuonSettings(lr=0.02, period=period, row_scale=0.25))], *DTYPES["float64"])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_chunks_stacks_and_convolutions(dtype) -> None:
    setting = MuonSettings(lr=0.02, adjust_lr_fn="match_rms_adamw")
    chunked = MuonSettings(lr=0.02, adjust_lr_fn="match_rms_adamw", chunks=3)
    cases = [((48, 16), chunked), ((48, 16), setting), ((4, 12, 20), setting), ((2, 24, 20), chunked)]
    check([*cases, ((8, 4, 3, 3), setting), ((8, 4, 3, 3), setting), ((6, 2, 3, 3), chunked)], *dtype)


def test_every_group_has_its_own_settings() -> None:
    """Muon and AdamW groups in one optimizer; lr schedules, maximize, momentum, decay, coefficients."""
    schedule = [0.02 * 0.8**step for step in range(NUM_STEPS)]
    polar = resolve_coefficients("polar_express", 6)
    cases: list[tuple[tuple[int, ...], Settings]] = [
        ((12, 20), MuonSettings(lr=schedule, period=2)),
        ((12, 20), MuonSettings(lr=schedule[::-1], period=3, maximize=True, weight_decay=0.0)),
        ((12, 20), MuonSettings(lr=0.01, momentum=0.0, weight_decay=0.5, coefficients=polar)),
        ((12, 20), MuonSettings(lr=0.0, momentum=0.5)),
        ((12, 20), AdamWSettings(lr=schedule)),
        ((7,), AdamWSettings(lr=0.01, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.0)),
        ((3, 4, 5), AdamWSettings(lr=0.01, maximize=True)),
    ]
    check(cases, *DTYPES["float64"])


def test_missing_gradients() -> None:
    """A parameter without a gradient stays as it is; which step is a refresh doesn't depend on gradients."""
    cases = [
        ((12, 20), MuonSettings(lr=0.02)),
        ((8, 5), MuonSettings(lr=0.02, period=2)),
        ((9,), AdamWSettings(lr=0.02)),
    ]
    check(cases, *DTYPES["float64"], missing={(1, 0), (3, 0), (2, 1), (3, 1), (0, 2), (4, 2)})
