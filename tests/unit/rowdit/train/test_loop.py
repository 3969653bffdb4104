"""The loop: T1 (a resume is a resume), T14, interruption, divergence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rowdit.train import checkpoint
from rowdit.train.config import ConfigError, RunConfig
from rowdit.train.log import read_jsonl
from rowdit.train.loop import Outcome, check_dataset, read_outcome, remove_run, train
from rowdit.train.progress import Silent
from rowdit.train.stop import Interrupted, StopRequest
from toy_training import OPTIMIZERS, same_state, saved_state, toy_config, toy_dataset, with_optimizer


class StopAt(Silent):
    """Requests a stop after a step, as Ctrl-C would; or dies there, as a kill would."""

    def __init__(self, step: int, error: BaseException | None = None) -> None:
        self.at, self.error, self.stopping = step, error, False
        self.request = StopRequest(also=lambda: self.stopping)

    def step(self, step: int, loss: float, num_images: int) -> None:
        if step == self.at:
            if self.error:
                raise self.error
            self.stopping = True


def weight_sum(model: nn.Module, step: int) -> dict[str, Any]:
    """An evaluator that shows which weights it was given."""
    assert not model.training
    return {"total": float(sum(p.detach().double().sum() for p in model.parameters())), "evaluated_at": step}


def _losses(folder: Path) -> list[tuple[int, float, float, str]]:
    return [(r["step"], r["loss"], r["grad_norm"], r["kind"]) for r in read_jsonl(folder / "log.jsonl")]


def _evaluations(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["total"]) for row in read_jsonl(folder / "evaluations.jsonl")]


def _assert_same_run(folder: Path, reference: Path) -> None:
    assert _losses(folder) == _losses(reference)
    assert _evaluations(folder) == _evaluations(reference)
    assert same_state(folder, reference)


@pytest.mark.parametrize("stop_at", [1, 5, 7, 8])  # 7: between refreshes; 8: at a checkpoint and an evaluation
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_stop_and_resume_is_bit_equal(name: str, stop_at: int, tmp_path: Path) -> None:
    """T1: weights, momentum, average, data order, noise and times; seen in the saved state and in every loss."""
    config, dataset = toy_config(name), toy_dataset()
    assert train(config, dataset, tmp_path / "whole", evaluate=weight_sum) == Outcome("finished", 12)
    stopper = StopAt(stop_at)
    outcome = train(config, dataset, tmp_path / "parts", evaluate=weight_sum, stop=stopper.request, progress=stopper)
    assert outcome == Outcome("interrupted", stop_at)
    assert train(config, dataset, tmp_path / "parts", evaluate=weight_sum) == Outcome("finished", 12)
    _assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_after_a_kill_the_lost_steps_are_done_again(tmp_path: Path) -> None:
    config, dataset = toy_config(), toy_dataset()
    train(config, dataset, tmp_path / "whole", evaluate=weight_sum)
    killer = StopAt(7, RuntimeError("killed"))
    with pytest.raises(RuntimeError, match="killed"):
        train(config, dataset, tmp_path / "parts", evaluate=weight_sum, progress=killer)
    assert [row["step"] for row in read_jsonl(tmp_path / "parts" / "log.jsonl")] == list(range(1, 8))
    with open(tmp_path / "parts" / "log.jsonl", "a") as file:
        file.write('{"step": 8, "lo')  # and the last line is cut short
    last = checkpoint.newest(tmp_path / "parts" / "checkpoints")
    assert last is not None and last.step == 4
    train(config, dataset, tmp_path / "parts", evaluate=weight_sum)
    _assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_stop_within_an_evaluation_repeats_it(tmp_path: Path) -> None:
    config, dataset = toy_config(), toy_dataset()
    train(config, dataset, tmp_path / "whole", evaluate=weight_sum)

    def interrupted(model: nn.Module, step: int) -> dict[str, Any]:
        if step == 8:
            raise Interrupted
        return weight_sum(model, step)

    assert train(config, dataset, tmp_path / "parts", evaluate=interrupted) == Outcome("interrupted", 8)
    assert [step for step, _ in _evaluations(tmp_path / "parts")] == [4]
    train(config, dataset, tmp_path / "parts", evaluate=weight_sum)
    _assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_the_evaluator_gets_the_averaged_weights(tmp_path: Path) -> None:
    config = toy_config()
    train(config, toy_dataset(), tmp_path, evaluate=weight_sum)
    tensors, _ = saved_state(tmp_path)
    ema = {name.removeprefix("ema."): tensor for name, tensor in tensors.items() if name.startswith("ema.")}
    total = sum(float(tensor.double().sum()) for tensor in ema.values())
    assert _evaluations(tmp_path)[-1] == (12, pytest.approx(total, abs=1e-9))
    assert not all(torch.equal(ema[name], tensors[f"model.{name}"]) for name in ema)


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    config, dataset = toy_config(), toy_dataset()
    train(config, dataset, tmp_path / "with", evaluate=weight_sum)
    train(config, dataset, tmp_path / "without")
    assert _losses(tmp_path / "with") == _losses(tmp_path / "without")
    assert same_state(tmp_path / "with", tmp_path / "without")


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    config = toy_config()
    train(config, toy_dataset(), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert train(config, toy_dataset(), tmp_path) == Outcome("finished", 12)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_another_config_is_refused_with_its_keys(tmp_path: Path) -> None:
    config = toy_config("periodic")
    train(config, toy_dataset(), tmp_path)
    other = with_optimizer(toy_config("periodic", steps=20), row_scale=0.25)
    with pytest.raises(ConfigError, match=r"optimizer\.row_scale: 0\.5 -> 0\.25; train\.steps: 12 -> 20"):
        train(other, toy_dataset(), tmp_path)
    remove_run(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert train(other, toy_dataset(), tmp_path) == Outcome("finished", 20)


def test_where_it_is_saved_may_change(tmp_path: Path) -> None:
    """How often and how many checkpoints are kept doesn't change the run."""
    stopper = StopAt(5)
    train(toy_config(), toy_dataset(), tmp_path, stop=stopper.request, progress=stopper)
    outcome = train(toy_config(checkpoint_every=3, keep_checkpoints=1), toy_dataset(), tmp_path)
    assert outcome == Outcome("finished", 12)


def test_other_data_is_refused(tmp_path: Path) -> None:
    stopper = StopAt(5)
    train(toy_config(), toy_dataset(), tmp_path, stop=stopper.request, progress=stopper)
    with pytest.raises(ConfigError, match=r"data: toy-0:40x1x8x8:.* -> toy-7:"):
        train(toy_config(), toy_dataset(seed=7), tmp_path)


def test_a_run_that_diverges_ends_and_says_why(tmp_path: Path) -> None:
    config = with_optimizer(
        toy_config("adamw", max_skipped_in_row=3, grad_clip=None, steps=30, warmup_steps=0), lr=1e37
    )
    outcome = train(config, toy_dataset(), tmp_path, evaluate=lambda model, step: {"total": 0.0})
    assert outcome.status == "diverged" and "3 steps in a row" in outcome.reason
    assert read_outcome(tmp_path) == outcome
    assert train(config, toy_dataset(), tmp_path) == outcome
    assert json.loads((tmp_path / "finished.json").read_text())["num_skipped"] >= 3


def test_the_log_has_what_it_promises(tmp_path: Path) -> None:
    train(toy_config("periodic"), toy_dataset(), tmp_path, evaluate=weight_sum)
    rows = read_jsonl(tmp_path / "log.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["images_seen"] for row in rows] == [8 * step for step in range(1, 13)]
    assert [row["kind"] for row in rows][:4] == ["refresh", "row", "row", "refresh"]
    phases = [f"{phase}_seconds" for phase in ("data", "forward", "backward", "optimizer", "ema")]
    keys = {"step", "images_seen", "loss", "grad_norm", "lr", "seconds", "kind", *phases}
    for row in rows:
        assert keys <= set(row)
        assert all(row[phase] > 0 for phase in phases) and sum(row[phase] for phase in phases) < row["seconds"]
    evaluations = read_jsonl(tmp_path / "evaluations.jsonl")
    for row in evaluations:  # training time, evaluation excluded
        assert row["seconds"] == pytest.approx(sum(r["seconds"] for r in rows if r["step"] <= row["step"]))


def _with_model(**fields: Any) -> RunConfig:
    import dataclasses

    config = toy_config()
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **fields))


def test_data_that_does_not_fit_is_refused() -> None:
    """T16: at the start, naming both sides, not by a failed assertion in the embedding."""
    for num_classes in (2, 4):  # with 4, class 3 would be taken for the null class by whoever asks the data
        with pytest.raises(ConfigError, match=f"model.num_classes = {num_classes}, but the data has 3 classes"):
            check_dataset(_with_model(num_classes=num_classes), toy_dataset())
    with pytest.raises(ConfigError, match=r"\(1, 8, 8\).*the model takes \(3, 8, 8\); set model.in_channels"):
        check_dataset(_with_model(in_channels=3), toy_dataset())
