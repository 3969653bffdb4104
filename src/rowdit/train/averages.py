"""Snapshots of a run's power-function averages, and averages of other widths from them.

    RUN/averages/step-0000400/      as a checkpoint's folder, with the averages `power_STD` alone

A snapshot is written as a checkpoint is: sharded, whole or not at all. None is ever removed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rowdit.models.dit import DiT
from rowdit.train.checkpoint import Checkpoint, CheckpointError, complete_ones, read_header, read_tensors
from rowdit.train.config import ConfigError
from rowdit.train.posthoc import Profile, gamma_of_std, solve_coefficients
from rowdit.train.state import TrainState

FOLDER = "averages"


def snapshot_tensors(state: TrainState) -> dict[str, Tensor]:
    """The power-function averages of a state by name, the live tensors."""
    return {
        f"{label}.{name}": weight
        for label, average in state.averages.items()
        if label.startswith("power_")
        for name, weight in average.weights.items()
    }


def reconstruct(run: Path, model: DiT, std: float, step: int) -> list[dict[str, float]]:
    """Writes an average of any width into a plain model's parameters, one snapshot in memory at a time.

    Args:
        run: the run's folder.
        model: of the run's config; its trainable parameters are overwritten.
        std: the wanted width, in (0, 0.288).
        step: at which; snapshots after it aren't used. The average is that at the last snapshot up to it.

    Returns:
        What was put together: step, std and coefficient of each part.

    Raises:
        CheckpointError: the run has no snapshots up to that step.
        ConfigError: a width out of range.
    """
    try:
        gamma = gamma_of_std(std)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    parts: list[tuple[Checkpoint, str, Profile]] = []
    for snapshot in complete_ones(run / FOLDER):
        if snapshot.step <= step:
            for label, values in read_header(snapshot)["averages"].items():
                if label.startswith("power_"):
                    profile = Profile(values["num_updates"], gamma_of_std(float(label.removeprefix("power_"))))
                    parts.append((snapshot, label, profile))
    if not parts:
        raise CheckpointError(
            f"{run} has no snapshots of averages up to step {step}: train with train.ema_stds and "
            "train.ema_snapshot_every to have them"
        )
    profiles = [profile for _, _, profile in parts]
    coefficients = solve_coefficients(profiles, Profile(max(p.num_updates for p in profiles), gamma))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    sums = {name: torch.zeros_like(model.get_parameter(name), dtype=torch.float64) for name in names}
    for (snapshot, label, _), coefficient in zip(parts, coefficients, strict=True):
        weights = {f"{label}.{name}": torch.empty_like(model.get_parameter(name)) for name in names}
        read_tensors(snapshot, weights)
        for name in names:
            sums[name].add_(weights[f"{label}.{name}"].double(), alpha=float(coefficient))
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).copy_(sums[name])
    return [
        {"step": snapshot.step, "std": float(label.removeprefix("power_")), "coefficient": float(coefficient)}
        for (snapshot, label, _), coefficient in zip(parts, coefficients, strict=True)
    ]
