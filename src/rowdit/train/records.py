"""What a run writes while it goes: its two logs and its checkpoints, which are never ahead of the logs.

A row of `log.jsonl`: step, images_seen, loss and grad_norm of the whole batch, lr, kind (of the optimizer's step:
refresh, row, mixed, adamw, or skipped), and of the main rank's time, in seconds: `seconds` the whole, of which data,
forward, backward, optimizer (of which gather, newton_schulz and row_step) and ema. Rows of a file that lie after the
last checkpoint are dropped at a resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rowdit.train.averages import FOLDER, snapshot_tensors
from rowdit.train.checkpoint import Saver
from rowdit.train.config import RunConfig
from rowdit.train.log import JsonlLog
from rowdit.train.loggers import Logger
from rowdit.train.state import TrainState
from rowdit.train.step import StepResult
from rowdit.train.world import World


class Records:
    """The records of a run in its folder. All ranks call it alike; the main one writes the logs.

    Args:
        folder: of the run.
        config: of the run.
        state: that is saved.
        world: the ranks.
        loggers: get every row too; closed with the records.
        saved_step: of the checkpoint that the run was resumed from, -1 if from none.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        state: TrainState,
        world: World,
        loggers: Sequence[Logger],
        saved_step: int,
    ) -> None:
        self.config, self.state, self.world, self.loggers = config, state, world, loggers
        self._saved_step = saved_step
        keep, asynchronous = config.train.keep_checkpoints, config.train.async_checkpoints
        self._saver = Saver(folder / "checkpoints", world, keep=keep, asynchronous=asynchronous)
        self._averages = Saver(folder / FOLDER, world, keep=None, asynchronous=asynchronous, select=snapshot_tensors)
        self._logs: tuple[JsonlLog, JsonlLog] | None = None
        so_far: tuple[float, set[int]] = (0.0, set())
        if world.is_main:
            log, evaluations = (JsonlLog(folder / f"{name}.jsonl", state.step) for name in ("log", "evaluations"))
            so_far = (sum(row["seconds"] for row in log.rows), {row["step"] for row in evaluations.rows})
            self._logs = (log, evaluations)
        self.train_seconds, self.evaluated = world.share(so_far)

    def add_step(self, result: StepResult, data_seconds: float) -> None:
        """Records a step."""
        row = asdict(result) | {"seconds": result.seconds + data_seconds, "data_seconds": data_seconds}
        self.train_seconds += row["seconds"]
        if self._logs:
            row = {"step": self.state.step, "images_seen": self.state.images_seen} | row
            self._logs[0].append(row)
            for logger in self.loggers:
                logger.log_step(row)
        self._saver.poll()
        self._averages.poll()
        every = self.config.train.ema_snapshot_every
        if every and self.state.step % every == 0:
            self._averages.save(self.state, self.config)

    def add_evaluation(self, row: dict[str, Any]) -> None:
        """Records an evaluation."""
        self.evaluated.add(row["step"])
        if self._logs:
            self._logs[1].append(row)
            for logger in self.loggers:
                logger.log_evaluation(row)

    def save(self) -> None:
        """A checkpoint of the present step, unless there is one."""
        if self._saved_step == self.state.step:
            return
        for log in self._logs or ():
            log.sync()
        self._saver.save(self.state, self.config)
        self._saved_step = self.state.step

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *failure: object) -> None:
        for log in self._logs or ():
            log.close()
        if failure[0] is None:
            self._saver.wait()
            self._averages.wait()
        for logger in self.loggers:
            logger.close()
