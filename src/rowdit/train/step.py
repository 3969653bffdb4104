"""One training step: draws, loss, gradient, clipping, update, average. No I/O, no clock but for timing, no generator.

Every random number is a function of (seed, position in the stream, purpose), so neither the batch size, nor how it is
split into micro-batches, nor where the run was interrupted changes what an image is trained with.

Legend: B images, C channels, H x W pixels.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rowdit import streams
from rowdit.flow import drop_labels, flow_loss, logit_normal_time, uniform_time
from rowdit.train.config import RunConfig, TrainConfig
from rowdit.train.ema import Ema
from rowdit.train.optimizers import step_kind
from rowdit.train.schedule import apply_lr_factor_, lr_factor

if TYPE_CHECKING:
    from rowdit.data.batch import Batch


class TrainingDivergedError(RuntimeError):
    """Too many steps in a row had gradients that weren't finite."""


@dataclass
class TrainState:
    """All that a step changes. `step` counts batches taken from the stream, skipped ones too; `num_updates` doesn't."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: Ema
    step: int = 0
    images_seen: int = 0
    num_updates: int = 0
    num_skipped: int = 0
    num_skipped_in_row: int = 0


@dataclass(frozen=True)
class StepResult:
    """What a step did. `seconds` is the whole step, `optimizer_seconds` of it the optimizer's own."""

    loss: float
    grad_norm: float
    lr: float
    kind: str
    seconds: float
    optimizer_seconds: float


@dataclass(frozen=True)
class Draws:
    """A batch made ready: images x_BCHW in [-1, 1], labels y_B of which some are the null class, noise_BCHW, t_B."""

    x: Tensor
    y: Tensor
    noise: Tensor
    t: Tensor

    def to(self, device: torch.device) -> Draws:
        return Draws(*(v.to(device, non_blocking=True) for v in (self.x, self.y, self.noise, self.t)))


def draw(batch: Batch, config: TrainConfig, num_classes: int) -> Draws:
    """Noise, times and dropped labels of a batch, each from its own stream at the images' positions."""
    noise = streams.normal(config.seed, "noise", batch.positions, tuple(batch.images.shape[1:]))
    u = streams.uniform(config.seed, "time", batch.positions)
    t = uniform_time(u) if config.time_sampling == "uniform" else logit_normal_time(u)
    drop = streams.uniform(config.seed, "class_dropout", batch.positions)
    y = drop_labels(batch.labels, drop, config.class_dropout, num_classes)
    return Draws(batch.images, y, noise, t)


def train_step(state: TrainState, batch: Batch, config: RunConfig) -> StepResult:
    """Trains on one batch and updates `state` in place.

    A step whose gradient norm isn't finite is skipped and counted: weights, momentum, average and the optimizer's own
    step counters stay as they are, so a refresh that was due is due again. The place in the data moves on.

    Raises:
        TrainingDivergedError: `max_skipped_in_row` steps were skipped in a row. `state` holds the last good weights.
    """
    start = time.perf_counter()
    factor = lr_factor(state.step, config.train)
    apply_lr_factor_(state.optimizer, factor)
    device = next(state.model.parameters()).device
    draws = draw(batch, config.train, config.model.num_classes).to(device)

    state.model.train()
    state.optimizer.zero_grad(set_to_none=True)
    loss = backward(state.model, draws, config.train.micro_batch_size)
    grad_norm = clip_gradients_(state.model, config.train.grad_clip)

    state.step += 1
    state.images_seen += config.train.batch_size
    kind, optimizer_seconds = "skipped", 0.0
    if grad_norm < float("inf"):  # False for NaN too
        kind = step_kind(state.optimizer)
        optimizer_start = time.perf_counter()
        state.optimizer.step()
        optimizer_seconds = time.perf_counter() - optimizer_start
        state.ema.update(state.model)
        state.num_updates += 1
        state.num_skipped_in_row = 0
    else:
        state.optimizer.zero_grad(set_to_none=True)
        state.num_skipped += 1
        state.num_skipped_in_row += 1
    seconds = time.perf_counter() - start
    if state.num_skipped_in_row >= config.train.max_skipped_in_row:
        raise TrainingDivergedError(
            f"the gradient norm wasn't finite in {state.num_skipped_in_row} steps in a row, up to step {state.step} "
            f"(loss {loss:.4g}, {config.optimizer.name}, lr {config.optimizer.lr:g}); lower the learning rate"
        )
    return StepResult(loss, grad_norm, config.optimizer.lr * factor, kind, seconds, optimizer_seconds)


def backward(model: nn.Module, draws: Draws, micro_batch_size: int | None) -> float:
    """Adds the gradient of the batch's mean loss to `.grad`, in micro-batches; returns that mean loss.

    Each micro-batch contributes its *sum* over the size of the whole batch, so unequal pieces weigh right as well.
    """
    num_images = len(draws.x)
    size = micro_batch_size or num_images
    total = torch.zeros((), device=draws.x.device, dtype=torch.float64)
    for start in range(0, num_images, size):
        piece = slice(start, start + size)
        losses_B = flow_loss(model, draws.x[piece], draws.y[piece], draws.noise[piece], draws.t[piece])
        loss = losses_B.sum() / num_images
        loss.backward()
        total += loss.detach().double()
    return float(total)


def clip_gradients_(model: nn.Module, max_norm: float | None) -> float:
    """Scales the gradients to a global norm of at most `max_norm`; returns the norm before. Non-finite: left alone."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    value = float(norm)
    if max_norm is not None and value < float("inf"):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return value
