"""With period 1 the optimizer is ``torch.optim.Muon``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import rowmuon
from optimizer_cases import copies, give_grads, make_params, momentum_of, relative_difference, train

SHAPES = {
    "wide": (24, 80),
    "tall": (80, 24),
    "square": (48, 48),
    "one row": (1, 40),
    "one column": (40, 1),
    # long enough for the Gram form of the iteration
    "long row-wise": (128, 320),
    "long column-wise": (320, 128),
}
# Both normalise and round to bf16 in another order, and five quintic steps don't contract, so rounding shows.
TOLERANCE = {torch.float32: 0.03, torch.bfloat16: 0.15}
NUM_STEPS = 20


def both(shape, dtype, make, **settings) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(start, ours after 20 steps, torch's after 20 steps)."""
    ours, theirs = make_params([shape], dtype=dtype), make_params([shape], dtype=dtype)
    start = copies(ours)
    train(make(ours, **settings), ours, NUM_STEPS)
    train(torch.optim.Muon(theirs, **settings), theirs, NUM_STEPS)
    return start, ours, theirs


def periodic(params, **settings):
    return rowmuon.PeriodicRowMuon(params, period=1, **settings)


# bf16 without Nesterov is left out: torch 2.13 overwrites its momentum there (test_N10 in test_cases_numbers.py).
@pytest.mark.parametrize(
    ("dtype", "nesterov"),
    [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)],
    ids=["fp32-nesterov", "fp32", "bf16-nesterov"],
)
@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_period_1_is_torch_muon(shape, dtype, nesterov, adjust_lr_fn) -> None:
    settings = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    start, ours, theirs = both(shape, dtype, periodic, **settings)
    assert relative_difference(ours, theirs, start) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    "settings",
    [
        {"ns_steps": 3},
        {"ns_coefficients": (3.0, -3.2, 1.2), "ns_steps": 6},
        {"momentum": 0.0},
        {"momentum": 0.5, "weight_decay": 0.0},
        {"lr": torch.tensor(0.02)},
    ],
    ids=str,
)
def test_torch_muons_other_settings(settings) -> None:
    settings = {"lr": 0.02, **settings}
    start, ours, theirs = both((48, 32), torch.float32, periodic, **settings)
    assert relative_difference(ours, theirs, start) <= TOLERANCE[torch.float32]


def test_muon_is_period_1() -> None:
    start, ours, theirs = both((48, 32), torch.float32, rowmuon.Muon, lr=0.02)
    assert relative_difference(ours, theirs, start) <= TOLERANCE[torch.float32]
    _, periodic_1, _ = both((48, 32), torch.float32, periodic, lr=0.02)
    assert torch.equal(ours[0], periodic_1[0])


def test_defaults_are_torchs() -> None:
    ours = rowmuon.Muon(make_params([(8, 8)])).param_groups[0]
    theirs = torch.optim.Muon(make_params([(8, 8)])).param_groups[0]
    assert {key: ours[key] for key in theirs if key != "params"} == {k: v for k, v in theirs.items() if k != "params"}


def test_positional_arguments_are_torchs() -> None:
    arguments = (0.01, 0.2, 0.9, False, (3.0, -3.2, 1.2), 1e-6, 4, "match_rms_adamw")
    ours = rowmuon.PeriodicRowMuon(make_params([(8, 8)]), *arguments).param_groups[0]
    theirs = torch.optim.Muon(make_params([(8, 8)]), *arguments).param_groups[0]
    assert {key: ours[key] for key in theirs if key != "params"} == {k: v for k, v in theirs.items() if k != "params"}


def test_momentum_is_torchs_bit_for_bit() -> None:
    ours, theirs = make_params([(24, 16)]), make_params([(24, 16)])
    opt, ref = periodic(ours, lr=0.02), torch.optim.Muon(theirs, lr=0.02)
    for step in range(5):
        for params, optimizer in ((ours, opt), (theirs, ref)):
            give_grads(params, step)
            optimizer.step()
        assert torch.equal(momentum_of(opt, ours[0]), momentum_of(ref, theirs[0]))
