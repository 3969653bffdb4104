"""The moving average of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rowdit.train.ema import Ema


def _model(value: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Linear(3, 2).to(dtype)
    for p in model.parameters():
        nn.init.constant_(p, value)
    return model


def test_follows_the_formula_with_its_ramp() -> None:
    model = _model(0.0)
    ema = Ema(model, decay=0.5)
    expected = 0.0
    for n in range(12):
        for p in model.parameters():
            nn.init.constant_(p, float(n + 1))
        ema.update(model)
        decay = min(0.5, (1 + n) / (10 + n))
        expected += (1 - decay) * (n + 1 - expected)
    torch.testing.assert_close(ema.weights["weight"], torch.full((2, 3), expected))


def test_is_fp32_and_does_not_lose_small_moves_of_bf16_weights() -> None:
    model = _model(1.0, torch.bfloat16)
    ema = Ema(model, decay=0.999)
    ema.num_updates = 10**6  # past the ramp
    for p in model.parameters():
        nn.init.constant_(p, 1.0 + 2**-7)
    ema.update(model)
    assert ema.weights["weight"].dtype == torch.float32
    # In bf16, 1 + 0.001 / 128 would round to 1 and the average would never move.
    torch.testing.assert_close(ema.weights["weight"], torch.full((2, 3), 1 + 0.001 * 2**-7), rtol=1e-7, atol=0)


def test_does_not_share_memory_with_the_model() -> None:
    model = _model(1.0)
    ema = Ema(model, decay=0.9)
    nn.init.zeros_(model.weight)
    assert bool((ema.weights["weight"] == 1).all())


def test_swap_in_gives_back_the_own_weights_to_the_bit_also_after_an_error() -> None:
    model = _model(1.0, torch.bfloat16)
    ema = Ema(model, decay=0.9)
    ema.weights["weight"].fill_(1 / 3)  # bf16 can't hold it, so swapping through bf16 would damage the average
    own = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="planted"), ema.swap_in(model):
        assert bool((model.weight == torch.tensor(1 / 3, dtype=torch.bfloat16)).all())
        raise RuntimeError("planted")
    assert torch.equal(model.weight, own)
    assert bool((ema.weights["weight"] == torch.tensor(1 / 3)).all())


def test_two_averages_give_two_outputs_of_a_compiled_model() -> None:
    """T12: the values are swapped inside the parameters, so a compiled graph sees them."""
    model = _model(1.0)
    compiled = torch.compile(model, backend="eager")
    x = torch.ones(1, 3)
    first, second = Ema(model, 0.9), Ema(model, 0.9)
    second.weights["weight"].fill_(2.0)
    outputs = []
    for ema in (first, second):
        with ema.swap_in(model), torch.no_grad():
            outputs.append(compiled(x).clone())
    assert not torch.equal(*outputs)


def test_frozen_parameters_are_left_out() -> None:
    model = _model()
    model.bias.requires_grad_(False)
    assert set(Ema(model, 0.9).weights) == {"weight"}


def test_refuses_weights_of_another_model() -> None:
    ema = Ema(_model(), 0.9)
    with pytest.raises(ValueError, match="missing \\['bias'\\]"):
        ema.load_state_dict({"weight": torch.zeros(2, 3)}, 1)
    with pytest.raises(ValueError, match=r"EMA of weight: \(1, 3\), model has \(2, 3\)"):
        ema.load_state_dict({"weight": torch.zeros(1, 3), "bias": torch.zeros(2)}, 1)


def test_refuses_a_decay_of_one() -> None:
    with pytest.raises(ValueError, match="decay = 1"):
        Ema(_model(), 1)
