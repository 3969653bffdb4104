"""`rowdit export --format`: a trained run for the public DiT's code and for diffusers, with equal outputs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from rowdit.cli import main
from rowdit.models.published import from_public, load_diffusers, read_weights
from rowdit.train.checkpoint import load_model
from rowdit.train.loop import train
from toy_training import toy_config, toy_dataset


@pytest.fixture(scope="module", params=[0, 1])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = toy_config()
    model = dataclasses.replace(config.model, freq_shift=request.param)
    train(dataclasses.replace(config, model=model), toy_dataset(), folder)
    return folder


def test_exports_compute_the_same(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = load_model(run)
    x, t, y = torch.randn(3, 1, 8, 8), torch.tensor([0.0, 0.4, 1.0]), torch.tensor([0, 2, 3])
    others = {0: "public", 1: "diffusers"}
    fits, refused = others[wanted.config.freq_shift], others[1 - wanted.config.freq_shift]
    out = tmp_path / fits
    assert main(["export", str(run), "--format", fits, "--out", str(out)]) == 0
    assert f"for {fits}" in capsys.readouterr().out
    if fits == "public":
        out.rename(tmp_path / "public.safetensors")
        again = from_public(read_weights(tmp_path / "public.safetensors"), num_heads=2)
    else:
        again = load_diffusers(out)
    assert torch.equal(again(x, t, y), wanted(x, t, y))
    assert main(["export", str(run), "--format", refused, "--out", str(tmp_path / "no")]) == 2
    assert "freq_shift" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
