"""Experimental cheap steps against slow float64 versions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rowmuon
from reference import step as reference
from rowdit.models.dit import DiT
from rowdit.study.steps import (
    CheapStepMuon,
    blocks_direction,
    build_optimizer,
    gram_direction,
    gram_factor,
    sign_direction,
)
from rowdit.train.config import ConfigError, OptimizerConfig
from rowdit.train.optimizers import build_optimizer as build_for_training
from toy_training import MODEL

SHAPES = [(6, 6), (12, 4), (4, 12), (1, 5), (5, 1)]


def scaled_to_polar(direction: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return direction * math.sqrt(min(direction.shape)) / np.linalg.norm(direction)


def exact_gram_direction(now: np.ndarray[Any, Any], then: np.ndarray[Any, Any], damping: float) -> Any:
    """By the singular value decomposition: the inverse root acts on the singular vectors of the small side."""
    left, values, right = np.linalg.svd(then, full_matrices=True)
    m, n = then.shape
    small = right.T if m >= n else left
    squares = np.zeros(min(m, n))
    squares[: len(values)] = values**2
    inverse_root = small @ np.diag(1 / np.sqrt(squares / squares.max() + damping)) @ small.T
    return scaled_to_polar(now @ inverse_root if m >= n else inverse_root @ now)


def draw(shape: tuple[int, int], seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_gram_direction_is_the_damped_inverse_root(shape: tuple[int, int]) -> None:
    then, now = draw(shape, 0), draw(shape, 1)
    factor = gram_factor(torch.from_numpy(then).float(), 1e-3)
    got = gram_direction(torch.from_numpy(now).float(), factor)
    # The factor's condition is sqrt(1 / damping), about 32, so float32 keeps five digits.
    np.testing.assert_allclose(got.numpy(), exact_gram_direction(now, then, 1e-3), atol=2e-5)


def test_with_little_damping_the_gram_direction_of_its_own_momentum_is_the_polar_factor() -> None:
    matrix = draw((9, 4), 2)
    factor = gram_factor(torch.from_numpy(matrix), 1e-12)
    got = gram_direction(torch.from_numpy(matrix).float(), factor)
    np.testing.assert_allclose(got.numpy(), reference.polar_factor(matrix), atol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_the_gram_step_does_not_depend_on_the_size_of_the_gradients(scale: float) -> None:
    then, now = (torch.from_numpy(draw((8, 5), seed)).float() for seed in (0, 1))
    want = gram_direction(now, gram_factor(then, 1e-3))
    torch.testing.assert_close(gram_direction(now * scale, gram_factor(then * scale, 1e-3)), want, atol=1e-5, rtol=0)


def test_a_momentum_of_zeros_blows_nothing_up() -> None:
    zero, later = torch.zeros(6, 4), torch.from_numpy(draw((6, 4), 3)).float()
    factor = gram_factor(zero, 1e-3)
    assert torch.equal(factor, torch.eye(4))
    direction = gram_direction(later, factor)
    np.testing.assert_allclose(direction.numpy(), scaled_to_polar(later.double().numpy()), atol=1e-6)
    assert torch.equal(gram_direction(zero, factor), zero)
    one_row = torch.zeros(6, 4)
    one_row[2] = 1.0
    assert torch.isfinite(gram_direction(later, gram_factor(one_row, 1e-3))).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_sign_has_the_norm_of_a_polar_factor(shape: tuple[int, int]) -> None:
    matrix = draw(shape, 4)
    got = sign_direction(torch.from_numpy(matrix))
    np.testing.assert_allclose(got.numpy(), scaled_to_polar(np.sign(matrix)), rtol=1e-12)


@pytest.mark.parametrize(("shape", "num_blocks"), [((8, 3), 4), ((8, 6), 4), ((5, 6), 2), ((3, 4), 9), ((6, 6), 1)])
def test_blocks_are_orthogonalised_by_themselves(shape: tuple[int, int], num_blocks: int) -> None:
    matrix = draw(shape, 5)

    def polar(block: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(reference.polar_factor(block.numpy()))

    got = blocks_direction(torch.from_numpy(matrix), num_blocks, polar).numpy()
    size = math.ceil(shape[0] / min(num_blocks, shape[0]))
    for start in range(0, shape[0], size):
        block = matrix[start : start + size]
        # Its RMS is that of the whole matrix's polar factor, not of its own.
        want = reference.polar_factor(block) * math.sqrt(max(block.shape) / max(shape))
        np.testing.assert_allclose(got[start : start + size], want, atol=1e-12)


def test_one_block_is_muon() -> None:
    matrix = torch.from_numpy(draw((6, 4), 6))
    got = blocks_direction(matrix, 1, lambda u: rowmuon.newton_schulz(u, "keller_jordan", dtype=torch.float64))
    np.testing.assert_allclose(got.numpy(), reference.newton_schulz(matrix.numpy(), reference.KELLER_JORDAN))


# ---------------------------------------------------------------------------------------------------------------------
# the optimizer


class Steps:
    """The same few steps by the optimizer and by the float64 reference, on one fused matrix of two chunks."""

    chunks, lr, decay, mu, scale, period = 2, 0.02, 0.1, 0.9, 0.5, 3

    def __init__(self, shape: tuple[int, int], num_steps: int) -> None:
        self.weight = draw(shape, 7)
        self.gradients = [draw(shape, 10 + i) for i in range(num_steps)]

    def by_the_optimizer(self, cheap_step: str, parameter: float | None = None) -> np.ndarray[Any, Any]:
        weight = nn.Parameter(torch.from_numpy(self.weight.copy()))
        optimizer = CheapStepMuon(
            [{"params": [weight], "chunks": self.chunks}],
            lr=self.lr,
            weight_decay=self.decay,
            momentum=self.mu,
            adjust_lr_fn="match_rms_adamw",
            period=self.period,
            cheap_step=cheap_step,
            cheap_scale=self.scale,
            parameter=parameter,
            ns_dtype=torch.float64,
        )
        for gradient in self.gradients:
            weight.grad = torch.from_numpy(gradient)
            optimizer.step()
        return weight.detach().numpy()

    def by_the_reference(self, direction: Any) -> np.ndarray[Any, Any]:
        weight, momentum = self.weight.copy(), np.zeros_like(self.weight)
        last: Any = None
        for step, gradient in enumerate(self.gradients):
            momentum = self.mu * momentum + (1 - self.mu) * gradient
            update = np.split(self.mu * momentum + (1 - self.mu) * gradient, self.chunks)
            if step % self.period == 0:
                last = update
                moves = [reference.newton_schulz(u, reference.KELLER_JORDAN) for u in update]
            else:
                moves = [self.scale * direction(u, then) for u, then in zip(update, last, strict=True)]
            factor = reference.spectral_scale(*update[0].shape, "match_rms_adamw")
            weight = weight * (1 - self.lr * self.decay) - self.lr * factor * np.concatenate(moves)
        return weight


@pytest.mark.parametrize("shape", [(8, 3), (8, 9)])
def test_the_optimizer_takes_the_steps_of_the_reference(shape: tuple[int, int]) -> None:
    steps = Steps(shape, num_steps=8)

    def gram(now: Any, then: Any) -> Any:
        return exact_gram_direction(now, then, 1e-2)

    def blocks(now: Any, then: Any) -> Any:
        parts = np.split(now, 2)
        moved = [reference.newton_schulz(part, reference.KELLER_JORDAN) for part in parts]
        return np.concatenate(moved) * math.sqrt(max(parts[0].shape) / max(now.shape))

    np.testing.assert_allclose(steps.by_the_optimizer("gram", 1e-2), steps.by_the_reference(gram), atol=1e-6)
    np.testing.assert_allclose(steps.by_the_optimizer("blocks", 2), steps.by_the_reference(blocks), atol=1e-9)
    sign = steps.by_the_reference(lambda now, then: scaled_to_polar(np.sign(now)))
    np.testing.assert_allclose(steps.by_the_optimizer("sign"), sign, atol=1e-9)


def test_row_scale_zero_skips() -> None:
    model = DiT(MODEL, seed=0)
    optimizer = build_optimizer(model, OptimizerConfig(name="periodic", lr=0.02, row_scale=0.0, period=3))
    weight = model.get_parameter("blocks.0.mlp.fc1.weight")
    moved = []
    for step in range(5):
        before = weight.detach().clone()
        _give_gradients(model, step)
        optimizer.step()
        moved.append(not torch.equal(before, weight))
    assert moved == [True, False, False, True, False]


def test_a_saved_gram_step_goes_on_in_the_middle_of_a_period() -> None:
    config = OptimizerConfig(name="periodic", lr=0.02, cheap_step="gram", period=4)
    model = DiT(MODEL, seed=0)
    optimizer = build_optimizer(model, config)
    for step in range(6):
        if step == 2:
            copy = DiT(MODEL, seed=1)
            copy.load_state_dict(model.state_dict())
            other = build_optimizer(copy, config)
            other.load_state_dict(optimizer.state_dict())
        _give_gradients(model, step)
        optimizer.step()
        if step >= 2:
            _give_gradients(copy, step)
            other.step()
    for (name, a), b in zip(model.named_parameters(), copy.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_gram_row_is_no_experiment_any_more() -> None:
    config = OptimizerConfig(name="periodic", cheap_step="gram_row", cheap_step_parameter=1e-2)
    for build in (build_optimizer, build_for_training):
        optimizer = build(DiT(MODEL, seed=0), config)
        assert type(optimizer) is rowmuon.PeriodicRowMuon
        assert (optimizer.options.cheap_step, optimizer.options.gram_damping) == ("gram_row", 1e-2)
    default = build_for_training(DiT(MODEL, seed=0), dataclasses.replace(config, cheap_step_parameter=None))
    assert isinstance(default, rowmuon.PeriodicRowMuon) and default.options.gram_damping == 1e-3
    for period in (None, ((0, 3), (8, None))):
        with pytest.raises(ConfigError, match="gram_row, which needs refreshes"):
            dataclasses.replace(config, period=period)


def test_training_refuses_an_experiment() -> None:
    with pytest.raises(ConfigError, match="cheap_step = 'gram' is experimental"):
        build_for_training(DiT(MODEL, seed=0), OptimizerConfig(name="periodic", cheap_step="gram"))


@pytest.mark.parametrize(
    "fields",
    [{"cheap_step": "sgn"}, {"cheap_step_parameter": 2.0}, {"cheap_step": "gram", "cheap_step_parameter": 0.0}],
)
def test_the_config_refuses_what_makes_no_sense(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cheap_step"):
        dataclasses.replace(OptimizerConfig(name="periodic"), **fields)


def _give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
