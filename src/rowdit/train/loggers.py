"""Where a run's rows go beside its own files: TensorBoard and Weights & Biases, if they are asked for."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any, Protocol

from rowdit.train.config import ConfigError


class Logger(Protocol):
    """Gets every row that a run records, on the main rank."""

    def log_step(self, row: dict[str, Any]) -> None: ...

    def log_evaluation(self, row: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Curves and sample grids as TensorBoard event files.

    Args:
        run: folder of the run; the events go into `run/tensorboard`.

    Raises:
        ConfigError: the package isn't there.
    """

    def __init__(self, run: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ConfigError(f"tensorboard: {error}; pip install '.[loggers]' in the clone installs it") from None
        self._run = run
        self._writer: Any = SummaryWriter(str(run / "tensorboard"))

    def log_step(self, row: dict[str, Any]) -> None:
        for name, value in scalars(row).items():
            self._writer.add_scalar(f"train/{name}", value, row["step"])
        self._writer.add_scalar(f"optimizer_seconds/{row['kind']}", row["optimizer_seconds"], row["step"])

    def log_evaluation(self, row: dict[str, Any]) -> None:
        for name, value in scalars(row).items():
            self._writer.add_scalar(f"evaluation/{name}", value, row["step"])
        if "grid" in row:
            self._writer.add_image("samples", _pixels(self._run / row["grid"]), row["step"], dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """The same to Weights & Biases; offline with WANDB_MODE=offline, as that program's own switch says.

    Args:
        run: folder of the run; its files go into `run/wandb`.
        project: where the run is listed.
        config: the run's, as plain data.

    Raises:
        ConfigError: the package isn't there.
    """

    def __init__(self, run: Path, project: str, config: dict[str, Any]) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise ConfigError(f"wandb: {error}; pip install '.[loggers]' in the clone installs it") from None
        self._wandb, self._folder = wandb, run
        # The same id after a resume: rows at steps that it already has are left out by the service.
        self._run = wandb.init(
            project=project, name=run.name, id=_run_id(run), resume="allow", dir=str(run), config=config
        )

    def log_step(self, row: dict[str, Any]) -> None:
        values = {f"train/{name}": value for name, value in scalars(row).items()}
        self._run.log(values | {f"optimizer_seconds/{row['kind']}": row["optimizer_seconds"]}, step=row["step"])

    def log_evaluation(self, row: dict[str, Any]) -> None:
        values: dict[str, Any] = {f"evaluation/{name}": value for name, value in scalars(row).items()}
        if "grid" in row:
            values["samples"] = self._wandb.Image(str(self._folder / row["grid"]))
        self._run.log(values, step=row["step"])

    def close(self) -> None:
        self._run.finish()


def scalars(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of a row but its step; those of nested tables as `table/key`.

    >>> scalars({"step": 3, "loss": 0.5, "kind": "row", "by_t": {"0.0": 1.0}})
    {'loss': 0.5, 'by_t/0.0': 1.0}
    """
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, dict) and key != "fingerprint":
            found |= scalars(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and key != "step" and math.isfinite(value):
            found[prefix + key] = float(value)
    return found


def _pixels(path: Path) -> Any:
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(path).convert("RGB"))


def _run_id(run: Path) -> str:
    """A name for this folder's run that a later call finds again."""
    path = run / "wandb_id"
    if not path.exists():
        import secrets

        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
