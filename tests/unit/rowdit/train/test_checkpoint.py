"""Checkpoints: whole or absent, found by step, to the bit."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rowdit.data.index import batch_at
from rowdit.train import checkpoint
from rowdit.train.checkpoint import Checkpoint, CheckpointError
from rowdit.train.config import RunConfig
from rowdit.train.loop import build_state
from rowdit.train.step import TrainState, train_step
from toy_training import OPTIMIZERS, toy_config, toy_dataset


def _trained(config: RunConfig, steps: int) -> TrainState:
    state, dataset = build_state(config), toy_dataset()
    for _ in range(steps):
        batch = batch_at(dataset, seed=0, images_seen=state.images_seen, batch_size=config.train.batch_size)
        train_step(state, batch, config)
    return state


def _same(a: object, b: object) -> bool:
    """Deep equality of states, to the bit, types included (but for lists and tuples of torch's own groups)."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_everything_comes_back_to_the_bit(name: str, tmp_path: Path) -> None:
    config = toy_config(name)
    state = _trained(config, 4)
    state.num_skipped = 2
    saved = checkpoint.save(tmp_path, state, config)
    other = build_state(config)
    checkpoint.load(saved, other)
    assert _same(other.model.state_dict(), state.model.state_dict())
    assert _same(other.optimizer.state_dict(), state.optimizer.state_dict())
    assert _same(other.ema.weights, state.ema.weights)
    assert (other.step, other.images_seen, other.num_updates, other.num_skipped) == (4, 32, 4, 2)
    assert other.ema.num_updates == 4


def test_the_newest_is_the_one_with_the_largest_step(tmp_path: Path) -> None:
    """T2: not the largest and not the youngest."""
    config = toy_config()
    state = _trained(config, 2)
    for step in (9, 10, 8):  # the youngest is step 8; by name, "10" would come before "9"
        state.step = step
        checkpoint.save(tmp_path, state, config, keep=10)
    with open(tmp_path / "step_000009" / "model.safetensors", "ab") as file:
        file.write(b"\0" * 10_000)
    assert checkpoint.newest(tmp_path) == Checkpoint(tmp_path / "step_000010", 10)


def test_half_written_ones_are_never_picked(tmp_path: Path) -> None:
    config = toy_config()
    state = _trained(config, 1)
    good = checkpoint.save(tmp_path, state, config)
    shutil.copytree(good.path, tmp_path / ".writing_step_000099")  # killed before the rename
    (tmp_path / "step_000098").mkdir()  # made by hand, or by another program
    (tmp_path / "step_000097").write_text("a file")
    assert checkpoint.newest(tmp_path) == good
    state.step = 2
    checkpoint.save(tmp_path, state, config)
    assert not (tmp_path / ".writing_step_000099").exists()


def test_no_folder_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "absent") is None


def test_a_kill_at_any_moment_of_saving_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that touches the disk is made the last one, in turn."""
    config = toy_config()
    state = _trained(config, 1)
    good = checkpoint.save(tmp_path, state, config)
    state.step = 2

    class Killed(BaseException):
        pass

    calls = {"left": 0}

    def dying(function):
        def call(*args, **kwargs):
            if calls["left"] == 0:
                raise Killed
            calls["left"] -= 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write", dying(checkpoint._write))
        patch.setattr(checkpoint, "_sync", dying(checkpoint._sync))
        patch.setattr(os, "replace", dying(os.replace))
        for moment in range(6):  # four files, the folder, the rename; then it is there
            calls["left"] = moment
            with pytest.raises(Killed):
                checkpoint.save(tmp_path, state, config)
            assert checkpoint.newest(tmp_path) == good, moment
            checkpoint.load(good, build_state(config))
        calls["left"] = 6
        with pytest.raises(Killed):
            checkpoint.save(tmp_path, state, config)
    assert checkpoint.newest(tmp_path) == Checkpoint(tmp_path / "step_000002", 2)


def test_keeps_the_newest(tmp_path: Path) -> None:
    config = toy_config()
    state = _trained(config, 1)
    for step in range(1, 6):
        state.step = step
        checkpoint.save(tmp_path, state, config, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000004", "step_000005"]


def test_a_full_disk_is_named_and_the_last_good_one_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toy_config()
    state = _trained(config, 1)
    good = checkpoint.save(tmp_path, state, config)
    write = checkpoint._write

    def full(path: Path, content: bytes) -> None:
        if path.name == "optimizer.safetensors":
            path.write_bytes(content[:100])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr(checkpoint, "_write", full)
    state.step = 2
    with pytest.raises(
        CheckpointError, match="step_000002 .* the disk is full; the last good checkpoint, .*step_000001"
    ):
        checkpoint.save(tmp_path, state, config)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert checkpoint.newest(tmp_path) == good


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB; needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if (
        not mount
        or subprocess.run([mount, "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True).returncode
    ):
        pytest.skip("can't mount a tmpfs here (needs root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    """One toy checkpoint is about 140 kB: two fit, a third doesn't."""
    config = toy_config()
    state = _trained(config, 1)
    with pytest.raises(CheckpointError, match="the disk is full; the last good checkpoint"):
        for step in range(1, 9):
            state.step = step
            checkpoint.save(small_disk, state, config, keep=9)
    last = checkpoint.newest(small_disk)
    assert last is not None and last.step >= 1
    checkpoint.load(last, build_state(config))
    assert not list(small_disk.glob(".writing*"))


@pytest.mark.parametrize("name", ["model.safetensors", "ema.safetensors", "optimizer.safetensors"])
def test_a_file_cut_short_is_named(name: str, tmp_path: Path) -> None:
    config = toy_config()
    saved = checkpoint.save(tmp_path, _trained(config, 1), config)
    path = saved.path / name
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=f"{name}: .* were written.*remove .*step_000001"):
        checkpoint.load(saved, build_state(config))


def test_another_model_is_refused(tmp_path: Path) -> None:
    import dataclasses

    config = toy_config()
    saved = checkpoint.save(tmp_path, _trained(config, 1), config)
    deeper = dataclasses.replace(config, model=dataclasses.replace(config.model, depth=2))
    with pytest.raises(CheckpointError, match=r"step_000001 doesn't fit this run: .*blocks\.1"):
        checkpoint.load(saved, build_state(deeper))


def test_plain_data_of_an_optimizer_survives() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {
        "state": {0: {"step": torch.tensor(3.0), "momentum_buffer": torch.ones(2, dtype=torch.bfloat16)}},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "period": ((0, 3), (8, None)), "dtype": torch.bfloat16}],
        "flag": True,
        "name": None,
    }
    encoded = checkpoint._encode(value, "", tensors)
    import json

    assert _same(checkpoint._decode(json.loads(json.dumps(encoded)), tensors), value)


def test_what_is_not_plain_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'hook' is a function"):
        checkpoint._encode({"hook": lambda: None}, "", {})
