"""Exports: one file with its config, read without executing anything; averages put together from snapshots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from rowdit.cli import main
from rowdit.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    complete_ones,
    load_model,
    read_tensors,
    saved_tensors,
)
from rowdit.train.config import ConfigError
from rowdit.train.export import export, load_export, read_metadata
from rowdit.train.loop import train
from toy_training import saved_state, toy_config, toy_dataset


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(toy_config(ema_stds=(0.05, 0.1), ema_snapshot_every=2, ema_decays=(0.5,)), toy_dataset(), folder)
    return folder


def test_the_export_is_the_averaged_model(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.safetensors"
    assert main(["export", str(run), "--out", str(out)]) == 0
    assert "ema at step 12" in capsys.readouterr().out
    model, wanted = load_export(out), load_model(run)
    assert load_export(str(out)).config == load_model(str(run)).config == model.config  # a path may be a string
    assert model.config == wanted.config and not model.training
    assert all(torch.equal(v, wanted.state_dict()[name]) for name, v in model.state_dict().items())
    origin = json.loads(read_metadata(out)["origin"])
    assert (origin["step"], origin["images_seen"], origin["which"]) == (12, 96, "ema")
    assert origin["data"] == toy_dataset().fingerprint and origin["config"]["train"]["steps"] == 12
    with safe_open(out, framework="pt") as file:
        assert "pos_embed" not in file.keys()  # noqa: SIM118 (not a dict)


def test_other_weights_and_types(run: Path, tmp_path: Path) -> None:
    tensors, _ = saved_state(run)
    for which in ("model", "ema_0.5", "power_0.05"):
        export(run, tmp_path / "a.safetensors", which=which)
        model = load_export(tmp_path / "a.safetensors")
        assert all(torch.equal(p, tensors[f"{which}.{name}"]) for name, p in model.named_parameters())
    export(run, tmp_path / "b.safetensors", dtype="bfloat16")
    assert {p.dtype for p in load_export(tmp_path / "b.safetensors").parameters()} <= {torch.float32, torch.bfloat16}
    with pytest.raises(ConfigError, match="dtype = 'int8'"):
        export(run, tmp_path / "c.safetensors", dtype="int8")


def test_an_average_of_a_width_that_was_kept_comes_out_as_it_was(run: Path, tmp_path: Path) -> None:
    """At the last snapshot, which is that of the last step, the combination is the stored average itself."""
    assert [snapshot.step for snapshot in complete_ones(run / "averages")] == [2, 4, 6, 8, 10, 12]
    tensors, _ = saved_state(run)
    origin = export(run, tmp_path / "a.safetensors", std=0.1)
    assert len(origin["snapshots"]) == 12
    model = load_export(tmp_path / "a.safetensors")
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), tensors[f"power_0.1.{name}"], rtol=1e-4, atol=1e-5)
    origin = export(run, tmp_path / "b.safetensors", std=0.07)
    between = load_export(tmp_path / "b.safetensors")
    parts = {snapshot.step: _tensors(snapshot) for snapshot in complete_ones(run / "averages")}
    for name, p in between.named_parameters():
        expected = sum(
            part["coefficient"] * parts[part["step"]][f"power_{part['std']:g}.{name}"].double()
            for part in origin["snapshots"]
        )
        torch.testing.assert_close(p.detach().double(), expected, rtol=1e-5, atol=1e-6)


def _tensors(snapshot: Checkpoint) -> dict[str, torch.Tensor]:
    tensors = {name: torch.empty(shape) for name, (shape, _) in saved_tensors(snapshot).items()}
    assert all(name.startswith("power_") for name in tensors)
    read_tensors(snapshot, tensors)
    return tensors


def test_a_file_that_is_no_export_or_cut_short_is_named(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    export(run, out)
    out.write_bytes(out.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="can't read .*model.safetensors"):
        load_export(out)
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="wasn't written by `rowdit export`"):
        load_export(tmp_path / "other.safetensors")


def test_no_snapshots_no_width(tmp_path: Path) -> None:
    train(toy_config(steps=1), toy_dataset(), tmp_path)
    with pytest.raises(CheckpointError, match=r"no snapshots .* train.ema_stds and train.ema_snapshot_every"):
        export(tmp_path, tmp_path / "a.safetensors", std=0.1)
