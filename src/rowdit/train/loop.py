"""The training loop, to be read from top to bottom: build, resume, then step, log, evaluate, save.

    RUN/config.json           the resolved config; RUN/dataset.json names the data that it was trained on
    RUN/log.jsonl             a row a step: step, images_seen, loss, grad_norm, lr, seconds, optimizer_seconds, kind
    RUN/evaluations.jsonl     a row an evaluation: step, seconds of training so far, and what the evaluator measured
    RUN/checkpoints/          see `rowdit.train.checkpoint`
    RUN/finished.json         written last: where it ended, and `diverged`, the reason, if it couldn't go on

The same call resumes a run exactly where its last checkpoint stands. The loop knows no metric: it hands the model, with
the averaged weights in it, to an evaluator.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from rowdit.data.index import batch_at
from rowdit.models.dit import DiT
from rowdit.train import checkpoint
from rowdit.train.config import ConfigError, OptimizerConfig, RunConfig, differences, to_dict
from rowdit.train.ema import Ema
from rowdit.train.log import JsonlLog, write_json
from rowdit.train.optimizers import build_optimizer
from rowdit.train.progress import Progress, Silent
from rowdit.train.step import StepResult, TrainingDivergedError, TrainState, train_step
from rowdit.train.stop import Interrupted, StopRequest

if TYPE_CHECKING:
    from rowdit.data.batch import Dataset

MAY_CHANGE = ("train.checkpoint_every", "train.keep_checkpoints")  # on resuming: they don't touch what is trained

Evaluator = Callable[[nn.Module, int], dict[str, Any]]
"""(model in eval mode with averaged weights, step) -> what was measured, JSON-able. Must change nothing."""

Builder = Callable[[nn.Module, OptimizerConfig], torch.optim.Optimizer]
"""(model, its optimizer's config) -> the optimizer. A study brings its own for what it tries and what it records."""


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended, at which step, and why if the run diverged."""

    status: Literal["finished", "interrupted", "diverged"]
    step: int
    reason: str = ""


def build_state(config: RunConfig, build: Builder = build_optimizer) -> TrainState:
    """Model, optimizer and average at step 0; the initial weights depend on the config's model and seed alone."""
    model = DiT(config.model, seed=config.train.seed)
    return TrainState(model, build(model, config.optimizer), Ema(model, config.train.ema_decay))


def train(
    config: RunConfig,
    dataset: Dataset,
    folder: Path,
    *,
    evaluate: Evaluator | None = None,
    build: Builder = build_optimizer,
    stop: StopRequest | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Trains until `config.train.steps`, from the newest checkpoint in `folder` or from the start.

    Args:
        config: the run.
        dataset: training images that fit `config.model`.
        folder: of this run; made if absent.
        evaluate: called at `config.evaluate.steps(...)`.
        build: makes the optimizer.
        stop: asked after every step; when a stop was requested the state is saved and the call returns.
        progress: what to report to.

    Returns:
        How it ended. A run that diverged is over: its last good checkpoint stays, its last evaluations are absent.

    Raises:
        ConfigError: the folder holds a run of another config or of other data; what differs is listed.
        CheckpointError: a checkpoint can't be written or read.
    """
    stop, progress = stop or StopRequest(), progress or Silent()
    check_dataset(config, dataset)
    check_same_run(folder, config, dataset)
    ended = read_outcome(folder)
    if ended:
        return ended
    write_json(folder / "config.json", to_dict(config))
    write_json(folder / "dataset.json", {"fingerprint": dataset.fingerprint})

    state = build_state(config, build)
    last = checkpoint.newest(folder / "checkpoints")
    if last:
        checkpoint.load(last, state)
    progress.start_run(folder.name, state.step)
    steps, batch_size, seed = config.train.steps, config.train.batch_size, config.train.seed
    evaluation_steps = set(config.evaluate.steps(steps)) if evaluate else set()
    diverged = ""

    with _Records(folder, config, state, saved_step=state.step if last else -1) as records:
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
            if stop.requested:
                records.save()
                return Outcome("interrupted", state.step)

            start = time.perf_counter()
            batch = batch_at(dataset, seed=seed, images_seen=state.images_seen, batch_size=batch_size)
            data_seconds = time.perf_counter() - start
            try:
                result = train_step(state, batch, config)
            except TrainingDivergedError as error:
                diverged = str(error)
                break
            records.add_step(result, data_seconds)
            progress.step(state.step, result.loss, batch_size)
            if state.step % config.train.checkpoint_every == 0:
                records.save()
        records.save()
    return _finish(folder, state, records.train_seconds, diverged)


class _Records:
    """What a run writes while it goes: its two logs and its checkpoints, which are never ahead of the logs."""

    def __init__(self, folder: Path, config: RunConfig, state: TrainState, saved_step: int) -> None:
        self.folder, self.config, self.state, self.saved_step = folder, config, state, saved_step
        self.log = JsonlLog(folder / "log.jsonl", state.step)
        self.evaluations = JsonlLog(folder / "evaluations.jsonl", state.step)
        self.train_seconds: float = sum(row["seconds"] for row in self.log.rows)
        self.evaluated = {row["step"] for row in self.evaluations.rows}

    def add_step(self, result: StepResult, data_seconds: float) -> None:
        row = asdict(result) | {"seconds": result.seconds + data_seconds}
        self.log.append({"step": self.state.step, "images_seen": self.state.images_seen} | row)
        self.train_seconds += row["seconds"]

    def add_evaluation(self, row: dict[str, Any]) -> None:
        self.evaluations.append(row)
        self.evaluated.add(row["step"])

    def save(self) -> None:
        """A checkpoint of the present step, unless there is one."""
        if self.saved_step == self.state.step:
            return
        self.log.sync()
        self.evaluations.sync()
        keep = self.config.train.keep_checkpoints
        checkpoint.save(self.folder / "checkpoints", self.state, self.config, keep=keep)
        self.saved_step = self.state.step

    def __enter__(self) -> _Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.close()
        self.evaluations.close()


def _evaluate(evaluate: Evaluator, state: TrainState, train_seconds: float, progress: Progress) -> dict[str, Any]:
    """One row: the evaluator's measurements of the averaged weights."""
    progress.evaluating(state.step)
    start = time.perf_counter()
    with state.ema.swap_in(state.model):
        state.model.eval()
        measured = evaluate(state.model, state.step)
    row = {"step": state.step, "seconds": train_seconds} | measured
    seconds = time.perf_counter() - start
    progress.evaluated(state.step, _one_line(row), seconds)
    return row | {"evaluation_seconds": seconds}


def _one_line(row: dict[str, Any]) -> str:
    shown = {key: value for key, value in row.items() if isinstance(value, float) and key != "seconds"}
    return ", ".join(f"{key} {value:.4g}" for key, value in shown.items())


def _finish(folder: Path, state: TrainState, train_seconds: float, diverged: str) -> Outcome:
    ending = {"step": state.step, "images_seen": state.images_seen, "num_skipped": state.num_skipped}
    write_json(folder / "finished.json", ending | {"seconds": train_seconds, "diverged": diverged})
    return Outcome("diverged" if diverged else "finished", state.step, diverged)


def read_outcome(folder: Path) -> Outcome | None:
    """How the run in this folder ended; None if it hasn't."""
    path = folder / "finished.json"
    if not path.exists():
        return None
    ending = _read_json(path)
    return Outcome("diverged" if ending["diverged"] else "finished", ending["step"], ending["diverged"])


def check_same_run(folder: Path, config: RunConfig, dataset: Dataset | None = None) -> None:
    """Refuses to continue a run under another config, or on data that changed.

    Raises:
        ConfigError: listing what differs.
    """
    changed = []
    if (folder / "config.json").exists():
        changed = differences(_read_json(folder / "config.json"), config, ignore=MAY_CHANGE)
    if dataset and (folder / "dataset.json").exists():
        before = _read_json(folder / "dataset.json")["fingerprint"]
        if before != dataset.fingerprint:
            changed.append(f"data: {before} -> {dataset.fingerprint}")
    if changed:
        raise ConfigError(f"{folder} holds another run ({'; '.join(changed)})")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} isn't JSON ({error}); remove the folder {path.parent} to start over") from None


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
        raise ConfigError(f"model.num_classes = {model.num_classes}, but the data has {dataset.num_classes} classes")
    if len(dataset) < 1:
        raise ConfigError(f"the data source {config.data.source!r} holds no images")


def remove_run(folder: Path) -> None:
    """Deletes what a run wrote into its folder, and nothing else."""
    for name in ("config.json", "dataset.json", "log.jsonl", "evaluations.jsonl", "finished.json"):
        (folder / name).unlink(missing_ok=True)
    for name in ("checkpoints", "samples"):
        shutil.rmtree(folder / name, ignore_errors=True)
