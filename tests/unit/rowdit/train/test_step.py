"""One training step: T7, T9, T13, N3, N6 and N8 at one process."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rowdit.data.batch import Batch
from rowdit.data.index import batch_at
from rowdit.train.config import RunConfig
from rowdit.train.ema import Ema
from rowdit.train.loop import build_state
from rowdit.train.optimizers import build_optimizer
from rowdit.train.step import TrainingDivergedError, TrainState, backward, clip_gradients_, draw, train_step
from toy_training import OPTIMIZERS, toy_config, toy_dataset

NAMES = list(OPTIMIZERS)


def _batch(images_seen: int = 0, batch_size: int = 8, seed: int = 0) -> Batch:
    return batch_at(toy_dataset(), seed=seed, images_seen=images_seen, batch_size=batch_size)


def _gradients(config: RunConfig, micro_batch_size: int | None) -> tuple[float, dict[str, Tensor]]:
    # A fresh adaLN-zero model has zero gradients nearly everywhere; these weights don't.
    model = _warm_model(config)
    draws = draw(_batch(), config.train, config.model.num_classes)
    loss = float(backward(model, draws, micro_batch_size))
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _warm_model(config: RunConfig) -> nn.Module:
    model = build_state(config).model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return model


def _snapshot(state: TrainState) -> dict[str, Tensor]:
    """Every number that a step may change, by name."""
    tensors = {f"model.{k}": v for k, v in state.model.state_dict().items()}
    tensors |= {f"ema.{k}": v for k, v in state.ema.weights.items()}
    for index, values in state.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{k}": torch.as_tensor(v) for k, v in values.items()}
    return {k: v.detach().clone() for k, v in tensors.items()}


def _assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 3])
def test_micro_batches_give_the_gradient_of_the_whole_batch(micro_batch_size: int) -> None:
    """T7. Gradients here are up to about 1, so 1e-6 is a few roundings of fp32 sums in another order."""
    config = toy_config()
    loss, whole = _gradients(config, None)
    loss_pieces, pieces = _gradients(config, micro_batch_size)
    assert loss_pieces == pytest.approx(loss, abs=1e-6)
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-2
    for name in whole:
        torch.testing.assert_close(pieces[name], whole[name], rtol=0, atol=1e-6)


def test_accumulation_is_one_decision_of_the_optimizer() -> None:
    """N8: at most one refresh a step, however many micro-batches."""
    kinds = {}
    for micro in (None, 2):
        state, config = build_state(toy_config(micro_batch_size=micro)), toy_config(micro_batch_size=micro)
        kinds[micro] = [train_step(state, _batch(8 * i), config).kind for i in range(7)]
    assert kinds[None] == kinds[2] == ["refresh", "row", "row", "refresh", "row", "row", "refresh"]


def test_draws_depend_on_the_position_alone() -> None:
    """T9: neither on the batch's size nor on where it begins."""
    config = toy_config().train
    whole = draw(_batch(0, 8), config, 3)
    parts = [draw(_batch(start, 4), config, 3) for start in (0, 4)]
    for name in ("x", "y", "noise", "t"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts])), name


def test_no_two_positions_or_seeds_share_numbers() -> None:
    """T9: seed 41 at one position isn't seed 42 at the next."""
    batch = _batch(0, 8)
    draws = {seed: draw(batch, toy_config(seed=seed).train, 3) for seed in (41, 42)}
    for attribute in ("noise", "t"):
        rows = torch.cat([getattr(d, attribute).reshape(8, -1) for d in draws.values()])
        assert len(torch.unique(rows, dim=0)) == 16, attribute


def test_dropped_labels_become_the_null_class() -> None:
    batch = _batch(0, 400)
    y = draw(batch, toy_config(class_dropout=0.25).train, 3).y
    dropped = y == 3
    assert torch.equal(y[~dropped], batch.labels[~dropped])
    # 400 tosses with chance 1/4: 100, and four standard deviations are 35.
    assert 65 <= int(dropped.sum()) <= 135
    assert torch.equal(draw(batch, toy_config(class_dropout=0.0).train, 3).y, batch.labels)


def test_logit_normal_times_crowd_the_middle() -> None:
    batch = _batch(0, 400)
    uniform = draw(batch, toy_config().train, 3).t
    middle = draw(batch, toy_config(time_sampling="logit_normal").train, 3).t
    assert float((middle - 0.5).abs().mean()) < 0.8 * float((uniform - 0.5).abs().mean())


@pytest.mark.parametrize("name", NAMES)
def test_all_optimizers_start_alike(name: str) -> None:
    """Same weights, data, noise, times and dropped labels, so the same first loss and gradient norm."""
    state = build_state(toy_config(name))
    reference = build_state(toy_config("adamw"))
    _assert_same(
        {k: v for k, v in _snapshot(state).items() if not k.startswith("optimizer")},
        {k: v for k, v in _snapshot(reference).items() if not k.startswith("optimizer")},
    )
    result = train_step(state, _batch(), toy_config(name))
    expected = train_step(reference, _batch(), toy_config("adamw"))
    assert (result.loss, result.grad_norm) == (expected.loss, expected.grad_norm)


@pytest.mark.parametrize("name", NAMES)
def test_every_trainable_parameter_is_trained(name: str) -> None:
    config = toy_config(name)
    state = build_state(config)
    state.model = model = _into(state.model, _warm_model(config))
    before = copy.deepcopy(dict(model.named_parameters()))
    for i in range(3):
        train_step(state, _batch(8 * i), config)
    moved = {k for k, p in model.named_parameters() if not torch.equal(p, before[k])}
    assert moved == {k for k, p in model.named_parameters() if p.requires_grad}


def _into(model: nn.Module, source: nn.Module) -> nn.Module:
    model.load_state_dict(source.state_dict())
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_is_not_finite_skips_the_step(name: str, dtype: torch.dtype) -> None:
    """T13, N3: nothing moves but the place in the data, the count is kept, and a refresh that was due stays due."""
    config = toy_config(name)
    state = _state_of_dtype(config, dtype)
    for i in range(3):
        train_step(state, _batch(8 * i), config)
    before = _snapshot(state)
    parameter = next(p for n, p in state.model.named_parameters() if n.endswith("mlp.fc1.weight"))
    handle = parameter.register_hook(lambda g: torch.where(torch.arange(g.numel()).view_as(g) == 5, torch.inf, g))
    result = train_step(state, _batch(24), config)
    handle.remove()
    assert result.kind == "skipped" and not np.isfinite(result.grad_norm)
    _assert_same(_snapshot(state), before)
    assert (state.step, state.images_seen, state.num_updates, state.num_skipped) == (4, 32, 3, 1)

    result = train_step(state, _batch(32), config)
    assert result.kind == {"adamw": "adamw", "muon": "refresh", "periodic": "refresh"}[name]  # the fourth update
    assert (state.num_updates, state.num_skipped, state.num_skipped_in_row) == (4, 1, 0)
    assert all(bool(v.isfinite().all()) for v in _snapshot(state).values())


def _state_of_dtype(config: RunConfig, dtype: torch.dtype) -> TrainState:
    """A state whose weights are of `dtype`; its model takes fp32 images and times all the same."""

    def cast_inputs(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)

    model = build_state(config).model.to(dtype)
    model.register_forward_pre_hook(cast_inputs)
    return TrainState(model, build_optimizer(model, config.optimizer), Ema(model, config.train.ema_decay))


def test_stops_after_too_many_skipped_steps_in_a_row() -> None:
    config = toy_config(max_skipped_in_row=3)
    state = build_state(config)
    good = _snapshot(state)
    images = torch.full((8, 1, 8, 8), torch.nan)
    batch = Batch(images, torch.zeros(8, dtype=torch.int64), torch.arange(8))
    train_step(state, batch, config)
    train_step(state, batch, config)
    with pytest.raises(TrainingDivergedError, match="3 steps in a row, up to step 3 .*lower the learning rate"):
        train_step(state, batch, config)
    _assert_same(_snapshot(state), good)


def test_clipping_scales_raw_gradients() -> None:
    """N6: to the bound where the norm is above it, not at all where it is below."""
    model = nn.Linear(4, 3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    norm = clip_gradients_(model, 1.0)
    assert norm == pytest.approx(15**0.5)
    assert clip_gradients_(model, None) == pytest.approx(1.0, rel=1e-5)
    before = model.weight.grad.clone()
    clip_gradients_(model, 100.0)
    assert torch.equal(model.weight.grad, before)


def test_the_schedule_reaches_both_algorithms() -> None:
    config = toy_config("periodic", warmup_steps=4, steps=10)
    state = build_state(config)
    result = train_step(state, _batch(), config)
    assert result.lr == pytest.approx(3e-3 / 4)
    assert sorted({group["lr"] for group in state.optimizer.param_groups}) == pytest.approx([1e-3 / 4, 3e-3 / 4])


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    config = toy_config()
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        state = build_state(config)
        results.append(train_step(state, _batch(), config).loss)
        assert torch.equal(torch.get_rng_state(), before)
    assert results[0] == results[1]


def test_a_gradient_that_explodes_is_skipped_too() -> None:
    """T13: `skip_grad_norm` is a bound on the norm before clipping; at the bound the step is taken."""
    config = toy_config("periodic", grad_clip=0.1)
    norm = train_step(build_state(config), _batch(), config).grad_norm
    for limit, kind in ((norm, "refresh"), (0.99 * norm, "skipped")):
        bounded = toy_config("periodic", grad_clip=0.1, skip_grad_norm=limit)
        state = build_state(bounded)
        good = _snapshot(state)
        assert train_step(state, _batch(), bounded).kind == kind
        if kind == "skipped":
            _assert_same(_snapshot(state), good)
            assert (state.num_skipped, state.num_updates, state.step) == (1, 0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_an_optimizer_step_are_timed(name: str) -> None:
    config = toy_config(name)
    state = build_state(config)
    results = [train_step(state, _batch(8 * i), config) for i in range(2)]
    for result in results:
        parts = (result.gather_seconds, result.newton_schulz_seconds, result.row_step_seconds)
        assert sum(parts) <= result.optimizer_seconds <= result.seconds
        assert (result.newton_schulz_seconds > 0) == (result.kind == "refresh")
        assert (result.row_step_seconds > 0) == (name != "adamw")
