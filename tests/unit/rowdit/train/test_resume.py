"""What may change between a run and its continuation, and what may not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from rowdit.models.parallel import ParallelConfig
from rowdit.train.config import ConfigError, RunConfig, to_dict
from rowdit.train.log import read_jsonl, write_json
from rowdit.train.loop import Outcome, train
from rowdit.train.progress import Silent
from rowdit.train.resume import check_same_run, remove_run
from toy_training import saved_state, toy_config, toy_dataset, with_optimizer


class Messages(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def _written(folder: Path, config: RunConfig) -> Path:
    write_json(folder / "config.json", to_dict(config))
    return folder


def test_how_it_is_computed_may_change_and_is_shown(tmp_path: Path) -> None:
    config = toy_config()
    changed = dataclasses.replace(
        toy_config(micro_batch_size=2, checkpoint_every=3), parallel=ParallelConfig(replicas=2)
    )
    assert check_same_run(_written(tmp_path, config), changed) == [
        "parallel.replicas: 1 -> 2",
        "train.checkpoint_every: 4 -> 3",
        "train.micro_batch_size: null -> 2",
    ]


def test_a_config_of_before_a_field_was_there_is_the_same(tmp_path: Path) -> None:
    old = to_dict(toy_config())
    old.pop("parallel")
    old["train"].pop("ema_stds")
    write_json(tmp_path / "config.json", old)
    assert check_same_run(tmp_path, toy_config()) == []


def test_longer_and_slower_if_it_is_allowed(tmp_path: Path) -> None:
    """The new settings hold, from the checkpoint on, and what changed is said."""
    config = toy_config("periodic")
    assert train(config, toy_dataset(), tmp_path) == Outcome("finished", 12)
    longer = with_optimizer(toy_config("periodic", steps=15), lr=1e-4)
    with pytest.raises(ConfigError, match=r"optimizer.lr: 0.003 -> 0.0001; train.steps: 12 -> 15"):
        train(longer, toy_dataset(), tmp_path)
    messages = Messages()
    outcome = train(longer, toy_dataset(), tmp_path, allow_changes=True, progress=messages)
    assert outcome == Outcome("finished", 15)
    assert messages.lines == ["changed: optimizer.lr: 0.003 -> 0.0001", "changed: train.steps: 12 -> 15"]
    rows = read_jsonl(tmp_path / "log.jsonl")
    assert [row["lr"] for row in rows[11:]] == pytest.approx([3e-3, 1e-4, 1e-4, 1e-4])
    assert [row["kind"] for row in rows[12:]] == ["refresh", "row", "row"]  # the period goes on
    assert json.loads((tmp_path / "config.json").read_text())["train"]["steps"] == 15
    _, values = saved_state(tmp_path)
    assert values["config"]["optimizer"]["lr"] == 1e-4


@pytest.mark.parametrize(
    "changed",
    [
        dataclasses.replace(toy_config(), model=dataclasses.replace(toy_config().model, depth=2)),
        toy_config("muon"),
        toy_config(seed=5),
        toy_config(ema_decays=(0.5,)),
        toy_config(ema_stds=(0.1,)),
    ],
)
def test_what_the_state_would_not_fit_is_refused_even_then(changed: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds another run"):
        check_same_run(_written(tmp_path, toy_config()), changed, allow_changes=True)


def test_a_run_that_diverged_goes_on_from_its_last_good_state(tmp_path: Path) -> None:
    """T13: with a lower learning rate, if that is allowed; the skipped steps before don't count against it."""
    wild = with_optimizer(toy_config("adamw", max_skipped_in_row=2, grad_clip=None, warmup_steps=0), lr=1e37)
    outcome = train(wild, toy_dataset(), tmp_path)
    assert outcome.status == "diverged" and outcome.step < 12
    assert train(wild, toy_dataset(), tmp_path) == outcome
    state, values = saved_state(tmp_path)
    assert values["num_skipped_in_row"] == 2
    bounded = with_optimizer(toy_config("adamw", max_skipped_in_row=2, grad_clip=None, warmup_steps=0), lr=0.0)
    again = train(bounded, toy_dataset(), tmp_path, allow_changes=True)
    # Its weights are still the wild ones, so it ends alike, but only after two more steps.
    assert again.status == "diverged" and again.step == outcome.step + 2


def test_other_data_is_a_change_like_a_learning_rate(tmp_path: Path) -> None:
    write_json(tmp_path / "dataset.json", {"fingerprint": toy_dataset().fingerprint})
    with pytest.raises(ConfigError, match="data: toy-0"):
        check_same_run(tmp_path, toy_config(), toy_dataset(seed=7))
    (change,) = check_same_run(tmp_path, toy_config(), toy_dataset(seed=7), allow_changes=True)
    assert change.startswith("data: toy-0")


@pytest.mark.parametrize("deletions", range(6))
def test_a_kill_amid_fresh_leaves_no_states_without_their_config(deletions: int, tmp_path: Path, monkeypatch) -> None:
    """Or the next call would go on from them under whatever it was given; nor an ending without its states."""
    for name in ("config.json", "dataset.json", "finished.json", "log.jsonl"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    done = 0

    def counted(real):
        def delete(path, **options):
            nonlocal done
            if done == deletions:
                raise KeyboardInterrupt
            if Path(path).exists():
                done += 1
            real(path, **options)

        return delete

    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    with contextlib.suppress(KeyboardInterrupt):
        remove_run(tmp_path)
    monkeypatch.undo()
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == max(0, 5 - deletions)
    assert "config.json" in left or "checkpoints" not in left
    assert "checkpoints" in left or "finished.json" not in left


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", "{", "isn't JSON"),
        ("config.json", "[]", "should be an object, but is a list"),
        ("dataset.json", "[]", "should be an object, but is a list"),
        ("dataset.json", "{}", "has no fingerprint"),
        ("finished.json", "", "isn't JSON"),
        ("finished.json", "{}", "has no diverged, step"),
    ],
)
def test_a_damaged_record_is_named_with_the_way_out(tmp_path: Path, name: str, text: str, said: str) -> None:
    _written(tmp_path, toy_config())
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{name} {said}.*remove the folder .* to start over"):
        train(toy_config(), toy_dataset(), tmp_path)
