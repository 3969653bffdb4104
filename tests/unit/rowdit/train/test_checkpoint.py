"""Checkpoints: whole or absent, found by step, to the bit; read by any number of ranks (see the distributed tests)."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rowdit.data.index import batch_at
from rowdit.train import checkpoint
from rowdit.train.checkpoint import Checkpoint, CheckpointError, Saver, load_model
from rowdit.train.config import RunConfig
from rowdit.train.state import TrainState, build_state, tensors_of, values_of
from rowdit.train.step import train_step
from toy_training import OPTIMIZERS, toy_config, toy_dataset


def _trained(config: RunConfig, steps: int) -> TrainState:
    state, dataset = build_state(config), toy_dataset()
    for _ in range(steps):
        batch = batch_at(dataset, seed=0, images_seen=state.images_seen, batch_size=config.train.batch_size)
        train_step(state, batch, config)
    return state


def _save(folder: Path, state: TrainState, config: RunConfig, **options: Any) -> Checkpoint:
    saver = Saver(folder, **options)
    saver.save(state, config)
    saver.wait()
    return Checkpoint(folder / f"step-{state.step:07d}", state.step)


def _same(a: TrainState, b: TrainState) -> bool:
    """To the bit."""
    tensors, others = tensors_of(a), tensors_of(b)
    same = tensors.keys() == others.keys() and values_of(a) == values_of(b)
    return same and all(t.dtype == others[n].dtype and torch.equal(t, others[n]) for n, t in tensors.items())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_everything_comes_back_to_the_bit(name: str, asynchronous: bool, tmp_path: Path) -> None:
    config = toy_config(name, ema_decays=(0.5,), ema_stds=(0.1,))
    state = _trained(config, 4)
    state.num_skipped = 2
    saved = _save(tmp_path, state, config, asynchronous=asynchronous)
    other = build_state(config, draw_weights=False)
    checkpoint.load(saved, other)
    assert _same(state, other)
    assert (other.step, other.images_seen, other.num_updates, other.num_skipped) == (4, 32, 4, 2)
    assert [average.num_updates for average in other.averages.values()] == [4, 4, 4]
    settings = [{k: v for k, v in g.items() if k != "params"} for g in state.optimizer.param_groups]
    fresh = [{k: v for k, v in g.items() if k != "params"} for g in build_state(config).optimizer.param_groups]
    assert [set(group) - {"initial_lr"} for group in settings] == [set(group) for group in fresh]


def test_training_goes_on_beside_an_asynchronous_save(tmp_path: Path) -> None:
    """What is saved is the state of its step, whatever is trained before it is written."""
    config = toy_config()
    state, reference = _trained(config, 2), _trained(config, 2)
    saver = Saver(tmp_path, asynchronous=True)
    saver.save(state, config)
    for tensor in tensors_of(state).values():
        tensor.zero_()
    saver.wait()
    other = build_state(config)
    checkpoint.load(Checkpoint(tmp_path / "step-0000002", 2), other)
    assert _same(other, reference)


def test_the_newest_is_the_one_with_the_largest_step(tmp_path: Path) -> None:
    """T2: not the largest and not the youngest."""
    config = toy_config()
    state = _trained(config, 2)
    for step in (9, 10, 8):  # the youngest is step 8
        state.step = step
        _save(tmp_path, state, config, keep=10)
    with open(tmp_path / "step-0000009" / "__0_0.distcp", "ab") as file:
        file.write(b"\0" * 10_000)
    assert checkpoint.newest(tmp_path) == Checkpoint(tmp_path / "step-0000010", 10)


def test_half_written_ones_are_never_picked(tmp_path: Path) -> None:
    config = toy_config()
    state = _trained(config, 1)
    good = _save(tmp_path, state, config)
    shutil.copytree(good.path, tmp_path / ".writing-step-0000099")  # killed before the rename
    (tmp_path / "step-0000098").mkdir()  # made by hand, or by another program
    (tmp_path / "step-0000097").write_text("a file")
    assert checkpoint.newest(tmp_path) == good
    state.step = 2
    _save(tmp_path, state, config)
    assert not (tmp_path / ".writing-step-0000099").exists()


def test_no_folder_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "absent") is None
    with pytest.raises(CheckpointError, match="has no complete checkpoint; name the folder that rowdit train wrote"):
        load_model(tmp_path)


def test_a_kill_at_any_moment_of_saving_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that touches the disk is made the last one, in turn. (A real kill is in the system tests.)"""
    config = toy_config()
    state = _trained(config, 1)
    good = _save(tmp_path, state, config)
    state.step = 2

    class Killed(BaseException):
        pass

    calls = {"left": 0}

    def dying(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if calls["left"] == 0:
                raise Killed
            calls["left"] -= 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in (
            (checkpoint, "_write_tensors"),
            (checkpoint, "write_json"),
            (checkpoint, "_sync"),
            (os, "replace"),
        ):
            patch.setattr(owner, name, dying(getattr(owner, name)))
        num_before = 5  # the tensors, the header and its rename, the folder's sync, the folder's rename
        for moment in range(num_before):
            calls["left"] = moment
            with pytest.raises(Killed):
                _save(tmp_path, state, config)
            assert checkpoint.newest(tmp_path) == good, moment
            checkpoint.load(good, build_state(config))
        calls["left"] = num_before
        with pytest.raises(Killed):
            _save(tmp_path, state, config)
    assert checkpoint.newest(tmp_path) == Checkpoint(tmp_path / "step-0000002", 2)


def test_keeps_the_newest(tmp_path: Path) -> None:
    config = toy_config()
    state = _trained(config, 1)
    for step in range(1, 6):
        state.step = step
        _save(tmp_path, state, config, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000004", "step-0000005"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_named_and_the_last_good_one_kept(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    config = toy_config()
    state = _trained(config, 1)
    good = _save(tmp_path, state, config)

    def full(self: Any, *args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self.path))

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    state.step = 2
    with pytest.raises(
        CheckpointError, match="step-0000002: the disk is full; the last good checkpoint, .*step-0000001"
    ):
        _save(tmp_path, state, config, asynchronous=asynchronous)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000001"]
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
    """One toy checkpoint is about 180 kB: two fit, a third doesn't."""
    config = toy_config()
    state = _trained(config, 1)
    with pytest.raises(CheckpointError, match="the disk is full; the last good checkpoint"):
        for step in range(1, 9):
            state.step = step
            _save(small_disk, state, config, keep=9)
    last = checkpoint.newest(small_disk)
    assert last is not None and last.step >= 1
    checkpoint.load(last, build_state(config))
    assert not list(small_disk.glob(".writing*"))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_file_cut_short_is_named(name: str, tmp_path: Path) -> None:
    config = toy_config()
    saved = _save(tmp_path, _trained(config, 1), config)
    path = saved.path / name
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=f"{name}: .* were written.*remove .*step-0000001"):
        checkpoint.load(saved, build_state(config))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json"])
def test_a_file_with_other_contents_of_the_same_size_is_named(name: str, tmp_path: Path) -> None:
    """What reads it raises anything, down to errors that are no Exception."""
    config = toy_config()
    saved = _save(tmp_path, _trained(config, 1), config)
    if name == "state.json":
        (saved.path / name).write_text("{}")
    else:
        (saved.path / name).write_bytes(bytes((saved.path / name).stat().st_size))
    with pytest.raises(
        CheckpointError, match=r"step-0000001.*; remove .*step-0000001 to go on from the checkpoint before"
    ):
        checkpoint.load(saved, build_state(config))


def test_another_model_is_refused(tmp_path: Path) -> None:
    config = toy_config()
    saved = _save(tmp_path, _trained(config, 1), config)
    deeper = dataclasses.replace(config, model=dataclasses.replace(config.model, depth=2))
    with pytest.raises(CheckpointError, match=r"step-0000001 doesn't fit this run: .*blocks\.1"):
        checkpoint.load(saved, build_state(deeper))
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, hidden_size=32))
    with pytest.raises(CheckpointError, match=r"doesn't fit this run: .* is \(.*16.*\), this run's is \(.*32.*\)"):
        checkpoint.load(saved, build_state(wider))


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    config = toy_config("adamw")
    saved = _save(tmp_path, _trained(config, 1), config)
    with pytest.raises(CheckpointError, match=r"missing \['optimizer\..*momentum_buffer"):
        checkpoint.load(saved, build_state(toy_config("muon")))


def test_the_model_of_a_run(tmp_path: Path) -> None:
    """`load_model`: a plain model in eval mode with the weights that were asked for."""
    config = toy_config(ema_decays=(0.5,))
    state = _trained(config, 4)
    _save(tmp_path / "checkpoints", state, config)
    wanted = {"model": dict(state.model.named_parameters())}
    wanted |= {label: average.weights for label, average in state.averages.items()}
    assert set(wanted) == {"model", "ema", "ema_0.5"}
    for which, weights in wanted.items():
        model = load_model(tmp_path, which)
        assert not model.training and model.config == config.model
        assert torch.equal(model.pos_embed, state.model.pos_embed)
        assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    with pytest.raises(CheckpointError, match=r"holds no 'emma'; it holds ema, ema_0.5, model"):
        load_model(tmp_path, "emma")
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; complete are: 4"):
        load_model(tmp_path, step=3)


def test_a_checkpoint_is_plain_data_beside_its_tensors(tmp_path: Path) -> None:
    config = toy_config()
    saved = _save(tmp_path, _trained(config, 1), config)
    header = json.loads((saved.path / "state.json").read_text())
    assert header["config"]["train"]["batch_size"] == 8 and header["num_ranks"] == 1
    assert header["optimizer"]["blocks.0.attn.qkv.weight"] == {"step": 1, "phase": 0}


def test_a_kill_amid_the_deletion_of_an_old_one_leaves_nothing_for_good(tmp_path: Path, monkeypatch: Any) -> None:
    """Half of a deleted checkpoint once stayed in the folder at every kill, of the size of the model's state."""
    config = toy_config()
    state = _trained(config, 1)
    _save(tmp_path, state, config, keep=1)
    delete = shutil.rmtree

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if Path(path).exists():
            (Path(path) / "state.json").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    state.step = 2
    with pytest.raises(KeyboardInterrupt):
        _save(tmp_path, state, config, keep=1)
    monkeypatch.setattr(shutil, "rmtree", delete)
    assert [c.step for c in checkpoint.complete_ones(tmp_path)] == [2]
    state.step = 3
    _save(tmp_path, state, config, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000003"]
