"""The training loop, to be read from top to bottom: build, resume, then step, log, evaluate, save.

    RUN/config.json           the resolved config; RUN/dataset.json names the data that it was trained on
    RUN/log.jsonl             a row a step, see `rowdit.train.records`; log.csv beside
    RUN/evaluations.jsonl     a row an evaluation: step, seconds of training so far, and what the evaluator measured
    RUN/checkpoints/          see `rowdit.train.checkpoint`
    RUN/finished.json         written last: where it ended, and `diverged`, the reason, if it couldn't go on

One process and many run the same lines; the main rank writes. The same call resumes a run exactly where its last
checkpoint stands, at any number of ranks. The loop knows no metric: it hands the model, with the averaged weights in
it, to an evaluator.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from rowdit.data.loader import Loader
from rowdit.models.parallel import resharded
from rowdit.train import checkpoint
from rowdit.train.config import ConfigError, OptimizerConfig, RunConfig, to_dict
from rowdit.train.log import write_json
from rowdit.train.loggers import Logger
from rowdit.train.optimizers import build_optimizer
from rowdit.train.progress import Progress, Silent
from rowdit.train.records import Records
from rowdit.train.resume import HARMLESS, check_same_run, read_json, remove_run
from rowdit.train.state import TrainState, build_state
from rowdit.train.step import TrainingDivergedError, train_step
from rowdit.train.stop import Interrupted, StopRequest
from rowdit.train.world import World

if TYPE_CHECKING:
    from rowdit.data.batch import Dataset

__all__ = [
    "Builder",
    "Evaluator",
    "Outcome",
    "build_state",
    "check_dataset",
    "check_ranks",
    "check_same_run",
    "read_outcome",
    "remove_run",
    "train",
]

Evaluator = Callable[[nn.Module, int], dict[str, Any]]
"""(model in eval mode with averaged weights, step) -> what was measured, JSON-able. Must change nothing. With several
ranks all call it alike, and the main rank's answer is recorded."""

Builder = Callable[[nn.Module, OptimizerConfig], torch.optim.Optimizer]
"""(model, its optimizer's config) -> the optimizer. A study brings its own for what it tries and what it records."""


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended, at which step, why if the run diverged, and `was_over` if it had nothing to do."""

    status: Literal["finished", "interrupted", "diverged"]
    step: int
    reason: str = ""
    was_over: bool = field(default=False, compare=False)


def train(
    config: RunConfig,
    dataset: Dataset,
    folder: Path,
    *,
    evaluate: Evaluator | None = None,
    build: Builder = build_optimizer,
    stop: StopRequest | None = None,
    progress: Progress | None = None,
    world: World | None = None,
    loggers: Sequence[Logger] = (),
    allow_changes: bool = False,
) -> Outcome:
    """Trains until `config.train.steps`, from the newest checkpoint in `folder` or from the start.

    Args:
        config: the run.
        dataset: training images that fit `config.model`.
        folder: of this run; made if absent. With several ranks all must see the same one.
        evaluate: called at `config.evaluate.steps(...)`.
        build: makes the optimizer.
        stop: asked after every step; when a stop was requested, on any rank, the state is saved and the call returns.
        progress: what to report to.
        world: the ranks; None is this process alone, on the CPU.
        loggers: get every row that is recorded, on the main rank.
        allow_changes: go on under a config that trains something else than before, if the state fits it.

    Returns:
        How it ended. A run that diverged is over: its last good checkpoint stays, its last evaluations are absent.

    Raises:
        ConfigError: the folder holds a run of another config or of other data, or one that is over and that changes
            were allowed for; what differs is listed.
        CheckpointError: a checkpoint can't be written or read.
    """
    stop, progress, world = stop or StopRequest(), progress or Silent(), world or World()
    check_dataset(config, dataset)
    check_ranks(config, world)
    changes = check_same_run(folder, config, dataset, allow_changes=allow_changes)
    ended = world.share(read_outcome(folder))
    if ended and not _may_go_on(ended, config, allow_changes):
        _check_nothing_asked(folder, ended, [change for change in changes if not change.startswith(HARMLESS)])
        return dataclasses.replace(ended, was_over=True)
    for change in changes:
        progress.message(f"changed: {change}")

    last = world.share(checkpoint.newest(folder / "checkpoints"))
    state = build_state(config, build, world=world, draw_weights=not last)
    if last:
        checkpoint.load(last, state, world)
    if ended:
        state.num_skipped_in_row = 0
    world.barrier()  # the others have read what is now replaced
    if world.is_main:
        (folder / "finished.json").unlink(missing_ok=True)
        write_json(folder / "config.json", to_dict(config))
        write_json(folder / "dataset.json", {"fingerprint": dataset.fingerprint})
    progress.start_run(folder.name, state.step)
    steps, batch_size = config.train.steps, config.train.batch_size
    evaluation_steps = _evaluation_steps(config) if evaluate else set()
    diverged = ""

    with (
        Records(folder, config, state, world, loggers, saved_step=state.step if last else -1) as records,
        _open_loader(config, dataset, state.images_seen, world) as batches,
    ):
        while True:
            # A checkpoint of this step may be older than its evaluation: so this comes first, also after a resume.
            if evaluate and state.step in evaluation_steps - records.evaluated:
                records.save()
                try:
                    records.add_evaluation(_evaluate(evaluate, state, records.train_seconds, progress))
                except Interrupted:
                    return Outcome("interrupted", state.step)
            if state.step >= steps:
                break
            if world.any(stop.requested):
                records.save()
                return Outcome("interrupted", state.step)

            start = time.perf_counter()
            batch = next(batches)
            data_seconds = time.perf_counter() - start
            try:
                result = train_step(state, batch, config, world)
            except TrainingDivergedError as error:
                diverged = str(error)
                break
            records.add_step(result, data_seconds)
            progress.step(state.step, result.loss, batch_size)
            if state.step % config.train.checkpoint_every == 0:
                records.save()
        records.save()
    return _finish(folder, state, records.train_seconds, diverged, world)


def _may_go_on(ended: Outcome, config: RunConfig, allow_changes: bool) -> bool:
    """A run that finished goes on if it was made longer, and one that diverged if something may be different now."""
    if ended.status == "diverged":
        return allow_changes
    return ended.step < config.train.steps


def _check_nothing_asked(folder: Path, ended: Outcome, changes: Sequence[str]) -> None:
    """A run that is over takes no changes: they would do nothing."""
    if changes:
        raise ConfigError(
            f"the run in {folder} ended at step {ended.step}, so this would change nothing ({'; '.join(changes)}); "
            f"give --train.steps more than {ended.step} to go on with it, another --out, or --fresh to start it over"
        )


def _evaluation_steps(config: RunConfig) -> set[int]:
    at_start = {0} if config.evaluate.at_start else set()
    return at_start | set(config.evaluate.steps(config.train.steps))


def _open_loader(config: RunConfig, dataset: Dataset, images_seen: int, world: World) -> Loader:
    """This rank's shares of the batches from here on."""
    return Loader(
        dataset,
        seed=config.train.seed,
        images_seen=images_seen,
        batch_size=config.train.batch_size,
        rank=world.rank,
        world_size=world.size,
        flip=config.data.flip,
        num_workers=config.data.num_workers,
        pin_memory=world.device.type == "cuda",
    )


def _evaluate(evaluate: Evaluator, state: TrainState, train_seconds: float, progress: Progress) -> dict[str, Any]:
    """One row: the evaluator's measurements of the averaged weights."""
    progress.evaluating(state.step)
    start = time.perf_counter()
    with resharded(state.model), state.ema.swap_in(state.model), resharded(state.model):
        state.model.eval()
        measured = evaluate(state.model, state.step)
    row = {"step": state.step, "seconds": train_seconds} | measured
    seconds = time.perf_counter() - start
    progress.evaluated(state.step, _one_line(row), seconds)
    if "caution" in row:
        progress.message(f"caution: {row['caution']}")
    return row | {"evaluation_seconds": seconds}


def _one_line(row: dict[str, Any]) -> str:
    shown = {key: value for key, value in row.items() if isinstance(value, float) and key != "seconds"}
    return ", ".join(f"{key} {value:.4g}" for key, value in shown.items())


def _finish(folder: Path, state: TrainState, train_seconds: float, diverged: str, world: World) -> Outcome:
    ending = {"step": state.step, "images_seen": state.images_seen, "num_skipped": state.num_skipped}
    if world.is_main:
        write_json(folder / "finished.json", ending | {"seconds": train_seconds, "diverged": diverged})
    world.barrier()
    return Outcome("diverged" if diverged else "finished", state.step, diverged)


def read_outcome(folder: Path) -> Outcome | None:
    """How the run in this folder ended; None if it hasn't."""
    path = folder / "finished.json"
    if not path.exists():
        return None
    ending = read_json(path, "diverged", "step")
    return Outcome("diverged" if ending["diverged"] else "finished", ending["step"], ending["diverged"])


def check_ranks(config: RunConfig, world: World) -> None:
    """Refuses a batch that the ranks can't share evenly.

    Raises:
        ConfigError: naming both numbers.
    """
    if config.train.batch_size % world.size:
        raise ConfigError(
            f"train.batch_size = {config.train.batch_size}: can't be shared evenly by {world.size} ranks; "
            f"take a multiple of {world.size}"
        )


def check_dataset(config: RunConfig, dataset: Dataset) -> None:
    """Refuses images or classes that don't fit the model.

    Raises:
        ConfigError: naming both sides.
    """
    model = config.model
    shape = (model.in_channels, model.image_size, model.image_size)
    if tuple(dataset.image_shape) != shape:
        raise ConfigError(
            f"the data's images are {tuple(dataset.image_shape)} (channels, height, width), the model takes {shape}; "
            "set model.in_channels and model.image_size"
        )
    if dataset.num_classes != model.num_classes:
        raise ConfigError(
            f"model.num_classes = {model.num_classes}, but the data has {dataset.num_classes} classes; give "
            f"--model.num-classes {dataset.num_classes}, or another data.source"
        )
    if len(dataset) < 1:
        raise ConfigError(f"the data source {config.data.source!r} holds no images")
