"""Whether a folder's run may be gone on with, and how a run's files go away."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rowdit.train.config import ConfigError, RunConfig, differences, from_dict, to_dict

if TYPE_CHECKING:
    from rowdit.data.batch import Dataset

HARMLESS = (
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.async_checkpoints",
    "train.micro_batch_size",
    "data.num_workers",
    "parallel.",
)
"""What may always change: where and how the same numbers are computed, kept and read."""
ESSENTIAL = (
    "model.",
    "train.seed",
    "optimizer.name",
    "optimizer.adaln",
    "optimizer.chunked",
    "train.ema_decay",
    "train.ema_stds",
)
"""What can't change: the state would fit no longer, or the stream of data would be another one."""


class AnotherRunError(ConfigError):
    """A folder holds a run of other settings.

    Args:
        message: what differs.
        state_fits: whether `allow_changes` would go on with it.
    """

    def __init__(self, message: str, state_fits: bool) -> None:
        super().__init__(message)
        self.state_fits = state_fits


def check_same_run(
    folder: Path, config: RunConfig, dataset: Dataset | None = None, *, allow_changes: bool = False
) -> list[str]:
    """Refuses to continue a run under another config, or on data that changed.

    Args:
        folder: of the run; one that holds none is in order.
        config: to go on with.
        dataset: to go on with.
        allow_changes: let pass what changes the training but not the shape of its state, such as a learning rate or
            the number of steps.

    Returns:
        What differs and may.

    Raises:
        AnotherRunError: listing what differs and may not.
    """
    changed: list[str] = []
    refused: list[str] = []
    if (folder / "config.json").exists():
        for difference in differences(_as_written_now(read_json(folder / "config.json")), config):
            key = difference.partition(":")[0]
            allowed = key.startswith(HARMLESS) or (allow_changes and not key.startswith(ESSENTIAL))
            (changed if allowed else refused).append(difference)
    if dataset and (folder / "dataset.json").exists():
        before = read_json(folder / "dataset.json", "fingerprint")["fingerprint"]
        if before != dataset.fingerprint:
            (changed if allow_changes else refused).append(f"data: {before} -> {dataset.fingerprint}")
    if refused:
        state_fits = not any(difference.startswith(ESSENTIAL) for difference in refused)
        raise AnotherRunError(f"{folder} holds another run ({'; '.join(refused)})", state_fits)
    return changed


def _as_written_now(saved: dict[str, Any]) -> dict[str, Any]:
    """A config of an older version with what was added since at its default, which means the same."""
    try:
        return to_dict(from_dict(RunConfig, saved))
    except ConfigError:
        return saved


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """A JSON file of a run's: an object, with these keys.

    Raises:
        ConfigError: it isn't.
    """
    start_over = f"remove the folder {path.parent} to start over"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} isn't JSON ({error}); {start_over}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} should be an object, but is a {type(found).__name__}; {start_over}")
    if missing := [key for key in keys if key not in found]:
        raise ConfigError(f"{path} has no {', '.join(missing)}; {start_over}")
    return found


def remove_run(folder: Path) -> None:
    """Deletes what a run wrote into its folder, and nothing else.

    Killed half-way, what is left is refused or overwritten, never gone on with: the ending goes first, and the config,
    by which another run is told, after the states.
    """
    (folder / "finished.json").unlink(missing_ok=True)
    for name in ("checkpoints", "samples", "averages", "evaluation", "tensorboard", "wandb"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("log.jsonl", "log.csv", "evaluations.jsonl", "evaluations.csv", "optimizer.txt", "wandb_id"):
        (folder / name).unlink(missing_ok=True)
    for name in ("dataset.json", "config.json"):
        (folder / name).unlink(missing_ok=True)
