"""One training step: draws, loss, gradient, clipping, update, average. No I/O, no clock but for timing, no generator.

Every random number is a function of (seed, position in the stream, purpose), so neither the batch size, nor how it is
split over ranks and micro-batches, nor where the run was interrupted changes what an image is trained with. Each rank
takes the step on its own share of the batch; loss and gradient norm are the whole batch's, the same on every rank.

Legend: B images, C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import rowmuon
from rowdit import streams
from rowdit.flow import drop_labels, flow_loss, logit_normal_time, uniform_time
from rowdit.models.parallel import ParallelConfig, set_last_micro_batch_
from rowdit.train.config import RunConfig, TrainConfig
from rowdit.train.optimizers import step_kind
from rowdit.train.phases import Phases
from rowdit.train.schedule import apply_lr_factor_, lr_factor
from rowdit.train.state import TrainState
from rowdit.train.world import World

if TYPE_CHECKING:
    from rowdit.data.batch import Batch


class TrainingDivergedError(RuntimeError):
    """Too many steps in a row had gradients that weren't finite."""


@dataclass(frozen=True)
class StepResult:
    """What a step did. `seconds` is the whole step on this rank, and of it `optimizer_seconds` the optimizer's own.

    The other parts are those of the forward and backward passes and of the averages; clipping and the draws are the
    rest. A gradient that travels during the backward pass counts there. Of the optimizer's seconds `gather_seconds` are
    those of a refresh's packing, sending, waiting and applying (0 for AdamW, as the next two), and
    `newton_schulz_seconds` and `row_step_seconds` what they say.
    """

    loss: float
    grad_norm: float
    lr: float
    kind: str
    seconds: float
    optimizer_seconds: float
    forward_seconds: float
    backward_seconds: float
    ema_seconds: float
    gather_seconds: float = 0.0
    newton_schulz_seconds: float = 0.0
    row_step_seconds: float = 0.0


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


def train_step(state: TrainState, batch: Batch, config: RunConfig, world: World | None = None) -> StepResult:
    """Trains on one batch, or on this rank's share of it, and updates `state` in place; all ranks alike.

    A step whose gradient norm isn't finite, or is above `skip_grad_norm`, is skipped and counted: weights, momentum,
    averages and the optimizer's own step counters stay as they are, so a refresh that was due is due again. The place
    in the data moves on.

    Raises:
        TrainingDivergedError: `max_skipped_in_row` steps were skipped in a row. `state` holds the last good weights.
    """
    world = world or World(device=next(state.model.parameters()).device)
    phases = Phases(world.device)
    factor = lr_factor(state.step, config.train)
    apply_lr_factor_(state.optimizer, factor)
    draws = draw(batch, config.train, config.model.num_classes).to(world.device)

    state.model.train()
    state.optimizer.zero_grad(set_to_none=True)
    accumulate = getattr(state.optimizer, "accumulate", nullcontext)  # AdamW of torch's has none
    micro_batch_size = config.train.micro_batch_size
    loss = world.mean(backward(state.model, draws, micro_batch_size, config.parallel, phases, accumulate))
    grad_norm = clip_gradients_(state.model, config.train.grad_clip)

    state.step += 1
    state.images_seen += config.train.batch_size
    kind = "skipped"
    limit = float("inf") if config.train.skip_grad_norm is None else config.train.skip_grad_norm
    if grad_norm < float("inf") and grad_norm <= limit:  # both False for NaN
        kind = step_kind(state.optimizer)
        if isinstance(state.optimizer, rowmuon.PeriodicRowMuon):
            state.optimizer.phase = phases
        with phases("optimizer"):
            state.optimizer.step()
        with phases("ema"):
            for average in state.averages.values():
                average.update(state.model)
        state.num_updates += 1
        state.num_skipped_in_row = 0
    else:
        state.optimizer.zero_grad(set_to_none=True)
        state.num_skipped += 1
        state.num_skipped_in_row += 1
    seconds = phases.finish()
    if state.num_skipped_in_row >= config.train.max_skipped_in_row:
        raise TrainingDivergedError(_explain(state, config, float(loss), grad_norm))
    return StepResult(
        loss=float(loss),
        grad_norm=grad_norm,
        lr=config.optimizer.lr * factor,
        kind=kind,
        seconds=seconds["whole"],
        optimizer_seconds=seconds.get("optimizer", 0.0),
        forward_seconds=seconds["forward"],
        backward_seconds=seconds["backward"],
        ema_seconds=seconds.get("ema", 0.0),
        **{f"{name}_seconds": seconds.get(name, 0.0) for name in ("gather", "newton_schulz", "row_step")},
    )


def backward(
    model: nn.Module,
    draws: Draws,
    micro_batch_size: int | None,
    parallel: ParallelConfig | None = None,
    phases: Phases | None = None,
    accumulate: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Tensor:
    """Adds the gradient of the batch's mean loss to `.grad`, in micro-batches; returns that mean loss, 0-dim float64.

    Each micro-batch contributes its *sum* over the size of the whole share, so unequal pieces weigh right as well. The
    shares of the ranks are equal, so the mean over the ranks, which FSDP2 takes of gradients, is the batch's.
    The backward of every micro-batch but the last is run in `accumulate()`.
    """
    parallel, phases = parallel or ParallelConfig(), phases or Phases(draws.x.device)
    num_images = len(draws.x)
    size = micro_batch_size or num_images
    total = torch.zeros((), device=draws.x.device, dtype=torch.float64)
    for start in range(0, num_images, size):
        piece = slice(start, start + size)
        last = start + size >= num_images
        set_last_micro_batch_(model, last, parallel)
        with phases("forward"):
            losses_B = flow_loss(model, draws.x[piece], draws.y[piece], draws.noise[piece], draws.t[piece])
            loss = losses_B.sum() / num_images
        with phases("backward"), nullcontext() if last else accumulate():
            loss.backward()
        total += loss.detach().double()
    return total


def clip_gradients_(model: nn.Module, max_norm: float | None) -> float:
    """Scales the gradients to a global norm of at most `max_norm`; returns the norm before, over all shards.

    Where the norm isn't finite, what the gradients hold afterwards means nothing.
    """
    return float(rowmuon.clip_grad_norm_(model.parameters(), float("inf") if max_norm is None else max_norm))


def _explain(state: TrainState, config: RunConfig, loss: float, grad_norm: float) -> str:
    what = f"{grad_norm:.4g}, above skip_grad_norm," if grad_norm < float("inf") else "not finite"
    return (
        f"the gradient norm was {what} in {state.num_skipped_in_row} steps in a row, up to step {state.step} "
        f"(loss {loss:.4g}, {config.optimizer.name}, lr {config.optimizer.lr:g}); lower the learning rate"
    )
