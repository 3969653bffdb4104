"""What is measured at a checkpoint. The feature network is the real one, the images are toys."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rowdit.data import ArrayDataset
from rowdit.models.dit import DiT
from rowdit.study.evaluator import Evaluator, write_grid
from rowdit.train.stop import Interrupted
from toy_training import MODEL, toy_config, toy_dataset


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluation")


def _evaluator(cache: Path, **kwargs) -> Evaluator:
    config = toy_config().evaluate
    return Evaluator(toy_dataset(40), toy_dataset(24, seed=1), config, ema_decay=0.9, cache=cache, **kwargs)


def test_the_same_model_measures_the_same(cache: Path, tmp_path: Path) -> None:
    model = DiT(MODEL).eval()
    evaluator = _evaluator(cache)
    first = evaluator.measure(model, tmp_path / "a.png")
    second = evaluator.measure(model, tmp_path / "b.png")
    assert first == second
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert all(math.isfinite(first[key]) for key in ("score_select", "score_report", "kid", "val_loss", "accuracy"))
    # From the cache everything must be as it was when it was made.
    assert _evaluator(cache).measure(model) == first
    assert first["score_select"] != first["score_report"]


def test_scores_carry_their_fingerprint(cache: Path) -> None:
    measured = _evaluator(cache).measure(DiT(MODEL).eval())
    sampling = measured["fingerprint"]["sampling"]
    assert sampling["first_index"] == 12 and sampling["ema"] == 0.9 and sampling["num_steps"] == 2
    assert measured["fingerprint"]["num_images"] == 12
    described = _evaluator(cache).describe()
    assert described["floor"] > 0 and described["floor_details"]["num_images"] == 12


def test_the_validation_loss_is_the_flow_loss_at_fixed_times(cache: Path) -> None:
    """A fresh adaLN-zero model predicts 0, so its loss is the mean square of noise - image."""
    evaluator = _evaluator(cache)
    expected = (evaluator.val_noise - evaluator.val_images).square().mean()
    assert evaluator.measure(DiT(MODEL).eval())["val_loss"] == pytest.approx(float(expected), rel=1e-6)
    assert float(evaluator.val_times.sort().values.diff().max()) < 3 / len(evaluator.val_times)


def test_a_diverged_model_scores_nan(cache: Path) -> None:
    model = DiT(MODEL).eval()
    with torch.no_grad():
        model.final_layer.linear.bias.fill_(torch.inf)
    measured = _evaluator(cache).measure(model)
    assert math.isnan(measured["score_select"]) and math.isnan(measured["score_report"])


def test_it_stops_when_told(cache: Path) -> None:
    asked = []

    def check_stop() -> None:
        asked.append(1)
        if len(asked) > 20:
            raise Interrupted

    evaluator = _evaluator(cache, check_stop=check_stop)
    with pytest.raises(Interrupted):
        for _ in range(20):
            evaluator.measure(DiT(MODEL).eval())


def test_grids_are_row_by_row(tmp_path: Path) -> None:
    images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 1, 2, 3) * 10
    write_grid(tmp_path / "grid.png", images, columns=3)
    pixels = np.asarray(Image.open(tmp_path / "grid.png"))
    assert pixels.shape == (4, 9)
    assert pixels[0, ::3].tolist() == [0, 10, 20] and pixels[2, ::3].tolist() == [30, 40, 0]


def test_colour_grids(tmp_path: Path) -> None:
    images = torch.zeros(2, 3, 2, 2, dtype=torch.uint8)
    images[1, 0] = 255
    write_grid(tmp_path / "grid.png", images, columns=2)
    assert np.asarray(Image.open(tmp_path / "grid.png"))[0, 3].tolist() == [255, 0, 0]


def test_samples_do_not_depend_on_the_training_seed(cache: Path) -> None:
    """Only on the evaluation's own seed, so that runs of different seeds are measured alike."""
    model = DiT(MODEL).eval()
    other = dataclasses.replace(toy_config().evaluate, seed=1)
    moved = Evaluator(toy_dataset(40), toy_dataset(24, seed=1), other, ema_decay=0.9, cache=cache)
    assert moved.measure(model)["score_select"] != _evaluator(cache).measure(model)["score_select"]


def test_labels_of_samples_have_the_held_out_frequencies(cache: Path) -> None:
    even = _evaluator(cache)._labels(9)
    assert even.tolist() == [0, 1, 2] * 3
    held_out = toy_dataset(24, seed=1)
    uneven = ArrayDataset(held_out.images, np.repeat([0, 1, 2], [18, 4, 2]), ("a", "b", "c"), name="uneven")
    evaluator = Evaluator(toy_dataset(40), uneven, toy_config().evaluate, ema_decay=0.9, cache=cache)
    for num in (50, 100, 400):
        counts = torch.bincount(evaluator._labels(num), minlength=3) / num
        np.testing.assert_allclose(counts, [0.75, 1 / 6, 1 / 12], atol=3 / num)
