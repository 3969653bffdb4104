"""How far a row step is from a spectral one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from reference import step as reference
from rowdit.models.dit import DiT
from rowdit.study.spectra import SpectraRecorder, layer_kind, read_spectra, spectrum, write_spectra_figures
from rowdit.train.config import OptimizerConfig
from toy_training import MODEL


@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (4, 9), (1, 5)])
def test_measures_are_those_of_the_definition(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(0).standard_normal(shape)
    rows, polar = reference.normalize_rows(matrix), reference.polar_factor(matrix)
    values = np.linalg.svd(matrix, compute_uv=False)
    lengths = np.sqrt((matrix**2).sum(1))
    measured = spectrum(torch.from_numpy(matrix))
    assert measured is not None
    cosine = (rows * polar).sum() / np.linalg.norm(rows) / np.linalg.norm(polar)
    assert measured["cosine"] == pytest.approx(cosine, abs=1e-12)
    assert measured["stable_rank"] == pytest.approx((values**2).sum() / values.max() ** 2)
    assert measured["row_spread"] == pytest.approx(lengths.std() / lengths.mean(), abs=1e-12)


def test_orthogonal_rows_make_both_steps_the_same_and_one_direction_makes_them_differ() -> None:
    orthogonal = spectrum(torch.diag(torch.tensor([3.0, 1.0, 0.2])))
    assert orthogonal is not None and orthogonal["cosine"] == pytest.approx(1.0)
    same_rows = spectrum(torch.ones(16, 4) + 1e-3 * torch.randn(16, 4, generator=torch.Generator().manual_seed(0)))
    assert same_rows is not None and same_rows["stable_rank"] == pytest.approx(1.0, abs=1e-4)
    assert same_rows["cosine"] == pytest.approx(1 / math.sqrt(4), abs=0.02)  # one of four directions gets it all


def test_size_plays_no_part_and_zeros_have_no_direction() -> None:
    matrix = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    assert spectrum(torch.zeros(3, 4)) is None
    assert spectrum(matrix * 1e-30) == pytest.approx(spectrum(matrix))


def test_kinds_leave_the_block_out() -> None:
    kinds = {layer_kind(name) for name, p in DiT(MODEL).named_parameters() if name.startswith("blocks") and p.ndim == 2}
    assert kinds == {"attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation"}


def test_it_records_at_every_so_manyth_refresh_and_changes_nothing(tmp_path: Path) -> None:
    config = OptimizerConfig(name="periodic", lr=0.01, period=2)
    weights = []
    for recorder in (SpectraRecorder(tmp_path / "run", every=2), None):
        model = DiT(MODEL, seed=0)
        optimizer = (
            recorder.build(model, config) if recorder else SpectraRecorder(tmp_path / "x", 99).build(model, config)
        )
        for step in range(9):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    rows = read_spectra(tmp_path / "run")
    assert sorted({row["step"] for row in rows}) == [1, 5, 9]  # refreshes come before steps 1, 3, 5, 7, 9 are done
    assert {row["num"] for row in rows if row["kind"] == "adaLN_modulation"} == {6}
    assert all(0 < row["cosine"] <= 1 for row in rows)
    assert [path.name for path in write_spectra_figures(tmp_path / "run")] == [
        "spectra-cosine.svg",
        "spectra-stable_rank.svg",
        "spectra-row_spread.svg",
    ]
    assert write_spectra_figures(tmp_path) == []


def test_adamw_records_nothing(tmp_path: Path) -> None:
    model = DiT(MODEL, seed=0)
    optimizer = SpectraRecorder(tmp_path).build(model, OptimizerConfig(name="adamw"))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert read_spectra(tmp_path) == []
    with pytest.raises(ValueError, match="every = 0"):
        SpectraRecorder(tmp_path, every=0)
