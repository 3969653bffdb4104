"""What goes to TensorBoard and W&B, seen by stand-ins for the two packages; neither is needed for the tests."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rowdit.train.config import ConfigError
from rowdit.train.loggers import TensorBoard, WeightsAndBiases
from rowdit.train.loop import train
from toy_training import toy_config, toy_dataset


class Recorder:
    """Keeps the calls of its methods."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.made_with = (args, kwargs)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def _evaluate_into(folder: Path) -> Any:
    def evaluate(model: Any, step: int) -> dict[str, Any]:
        (folder / "samples").mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), step).save(folder / "samples" / f"{step}.png")
        return {"val_loss": 0.5 / step, "by_t": {"a": 1.0}, "grid": f"samples/{step}.png", "fingerprint": {"n": 3}}

    return evaluate


def test_tensorboard_gets_every_row_and_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Recorder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    logger = TensorBoard(tmp_path)
    train(toy_config(steps=3), toy_dataset(), tmp_path, evaluate=_evaluate_into(tmp_path), loggers=[logger])
    writer = logger._writer
    assert writer.made_with[0] == (str(tmp_path / "tensorboard"),)
    scalars = [args for args, _ in writer.named("add_scalar")]
    assert [step for name, _, step in scalars if name == "train/loss"] == [1, 2, 3]
    assert [step for name, _, step in scalars if name == "optimizer_seconds/refresh"] == [1]
    assert [step for name, _, step in scalars if name == "optimizer_seconds/row"] == [2, 3]
    assert ("evaluation/by_t/a", 1.0, 3) in scalars and not any("fingerprint" in name for name, _, _ in scalars)
    images = [(args[0], args[1].shape, args[2]) for args, _ in writer.named("add_image")]
    assert images == [("samples", (4, 4, 3), step) for step in (1, 2, 3)]
    assert writer.calls[-1][0] == "close"


def test_wandb_gets_them_under_one_id_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Recorder] = []

    def init(**settings: Any) -> Recorder:
        runs.append(Recorder(**settings))
        return runs[-1]

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    module.Image = lambda path: ("image", path)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    for steps in (2, 3):
        logger = WeightsAndBiases(tmp_path, "project", {"a": 1})
        train(
            toy_config(steps=steps),
            toy_dataset(),
            tmp_path,
            evaluate=_evaluate_into(tmp_path),
            loggers=[logger],
            allow_changes=True,
        )
    ids = {run.made_with[1]["id"] for run in runs}
    assert len(runs) == 2 and len(ids) == 1 and runs[0].made_with[1]["project"] == "project"
    logged = [(kwargs["step"], set(args[0])) for args, kwargs in runs[0].named("log")]
    assert [step for step, names in logged if "train/loss" in names] == [1, 2]
    assert [step for step, names in logged if "samples" in names] == [1, 2]
    assert runs[0].calls[-1][0] == "finish"


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_the_way_out(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}[package]
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"{package}: .*pip install '\.\[loggers\]'"):
        TensorBoard(tmp_path) if package == "tensorboard" else WeightsAndBiases(tmp_path, "p", {})
