"""What is compared: one model, one stream of data, several optimizers. A plain value, made by a recipe."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import tyro

from rowdit.models.dit import DiTConfig
from rowdit.train.config import (
    ConfigError,
    DataConfig,
    EvaluateConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    nearest,
)


@dataclass(frozen=True)
class Comparison:
    """A recipe's content: everything that the runs share, and each optimizer under its label.

    Two runs of a comparison differ in the optimizer or in `train.seed`, and in nothing else: with equal seeds they have
    the same initial weights, data order, noise and times.

    `on_request` are labels of optimizers that run only where they are named.
    """

    model: DiTConfig
    data: DataConfig
    train: TrainConfig
    evaluate: EvaluateConfig
    optimizers: Annotated[dict[str, OptimizerConfig], tyro.conf.arg(name="")]
    on_request: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run_config(self, label: str, seed: int) -> RunConfig:
        """The config of one run."""
        train = dataclasses.replace(self.train, seed=seed)
        return RunConfig(self.model, self.data, self.optimizers[label], train, self.evaluate)

    def seeds(self, num: int) -> tuple[int, ...]:
        """`num` consecutive seeds from the recipe's own."""
        if num < 1:
            raise ConfigError(f"seeds = {num}: must be an integer >= 1")
        return tuple(self.train.seed + i for i in range(num))

    def select(self, labels: str | None) -> tuple[str, ...]:
        """The labels of a comma-separated list, in the recipe's order; for None all but those on request.

        Raises:
            ConfigError: a label that the recipe doesn't have.
        """
        if labels is None:
            return tuple(label for label in self.optimizers if label not in self.on_request)
        wanted = [label.strip() for label in labels.split(",") if label.strip()]
        for label in wanted:
            if label not in self.optimizers:
                raise ConfigError(f"optimizers: there is no {label!r}{nearest(label, self.optimizers)}")
        if not wanted:
            raise ConfigError(f"optimizers = {labels!r}: name at least one of {', '.join(self.optimizers)}")
        return tuple(label for label in self.optimizers if label in wanted)


def run_name(label: str, seed: int) -> str:
    """The name of a run's folder."""
    return f"{label}-seed{seed}"
