"""References, floors and scores: what belongs together is compared, what doesn't is refused with both sides shown."""

from __future__ import annotations

import dataclasses
import errno
import json
import os

import numpy as np
import pytest
import torch

from rowdit.data import ArrayDataset
from rowdit.evaluate import (
    FeatureStatistics,
    Floor,
    Reference,
    Sampling,
    Score,
    compute_reference,
    frechet_distance,
    kernel_distance,
    load_or_compute_reference,
    real_floor,
    reference,
    reference_fingerprint,
    score_images,
)

SHAPE = (1, 6, 6)


class PixelFeatures:
    """A cheap feature network: eight fixed projections of the pixels."""

    name = "pixels"
    dim = 8

    def __init__(self, sha256: str = "0123") -> None:
        self.sha256 = sha256
        self.num_images = 0
        self.weights = torch.randn(36, 8, generator=torch.Generator().manual_seed(0))

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        self.num_images += len(images)
        return (images.float() / 255).flatten(1) @ self.weights

    def fingerprint(self) -> dict:
        return {"name": self.name, "sha256": self.sha256}


def dataset(num_images: int, seed: int = 0, name: str = "noise", scale: int = 256) -> ArrayDataset:
    images = np.random.default_rng(seed).integers(0, scale, (num_images, *SHAPE), dtype=np.uint8)
    return ArrayDataset(images, np.arange(num_images) % 2, ("a", "b"), name=name)


def images_of(data: ArrayDataset) -> torch.Tensor:
    return torch.from_numpy(data.images)


class TestReference:
    def test_statistics_are_of_all_images_in_parts(self, monkeypatch):
        monkeypatch.setattr(reference, "IMAGES_PER_FETCH", 7)
        data, calls = dataset(30), []
        made = compute_reference(data, PixelFeatures(), progress=lambda done, total: calls.append((done, total)))
        expected = FeatureStatistics.from_features(PixelFeatures()(images_of(data)))
        assert made.statistics.num == 30
        torch.testing.assert_close(made.statistics.covariance, expected.covariance)
        torch.testing.assert_close(made.features, PixelFeatures()(images_of(data)))
        assert calls == [(7, 30), (14, 30), (21, 30), (28, 30), (30, 30)]

    def test_stored_features_are_bounded_and_statistics_are_not(self, monkeypatch):
        monkeypatch.setattr(reference, "IMAGES_PER_FETCH", 7)
        monkeypatch.setattr(reference, "MAX_STORED_FEATURES", 10)
        made = compute_reference(dataset(30), PixelFeatures())
        assert made.features.shape == (10, 8)
        assert made.statistics.num == 30

    def test_save_and_load(self, tmp_path):
        data, network = dataset(12), PixelFeatures()
        made = compute_reference(data, network)
        made.save(tmp_path / "sub" / "a.safetensors")
        loaded = Reference.load(tmp_path / "sub" / "a.safetensors", reference_fingerprint(data, network))
        assert loaded.hash == made.hash
        assert torch.equal(loaded.features, made.features)
        assert frechet_distance(loaded.statistics, made.statistics) == pytest.approx(0, abs=1e-6)
        assert os.listdir(tmp_path / "sub") == ["a.safetensors"]

    def test_computed_once(self, tmp_path):
        data, network = dataset(12), PixelFeatures()
        first = load_or_compute_reference(tmp_path, data, network)
        assert network.num_images == 12
        second = load_or_compute_reference(tmp_path, data, network)
        assert network.num_images == 12
        assert torch.equal(first.features, second.features)

    def test_others_live_beside_it(self, tmp_path):
        network = PixelFeatures()
        load_or_compute_reference(tmp_path, dataset(12), network)
        load_or_compute_reference(tmp_path, dataset(12, seed=1), network)
        load_or_compute_reference(tmp_path, dataset(12), PixelFeatures("4567"))
        load_or_compute_reference(tmp_path, dataset(12), network, num_images=10)
        assert len(list(tmp_path.iterdir())) == 4

    @pytest.mark.parametrize(
        ("other", "entry"),
        [
            ((dataset(12, seed=1), PixelFeatures()), "dataset"),
            ((dataset(12), PixelFeatures("4567")), "network.sha256: 0123 against 4567"),
            ((dataset(13), PixelFeatures()), "num_images: 12 against 13"),
        ],
    )
    def test_mismatch_is_refused_with_both_fingerprints(self, tmp_path, other, entry):
        """T20: statistics of another dataset, size or network are never used."""
        path = tmp_path / "a.safetensors"
        made = compute_reference(dataset(12), PixelFeatures())
        made.save(path)
        expected = reference_fingerprint(*other)
        with pytest.raises(ValueError) as error:
            Reference.load(path, expected)
        message = str(error.value)
        assert entry in message
        assert made.fingerprint["dataset"] in message
        assert expected["dataset"] in message

    def test_unreadable_files(self, tmp_path):
        path = tmp_path / "a.safetensors"
        with pytest.raises(FileNotFoundError, match=r"there is no file .*a\.safetensors"):
            Reference.load(path)
        path.write_bytes(b"not a safetensors file at all")
        with pytest.raises(ValueError, match=r"a\.safetensors can't be read.*delete it"):
            Reference.load(path)
        FeatureStatistics(3).save(path)
        with pytest.raises(ValueError, match=r"isn't a rowdit\.reference/1 file"):
            Reference.load(path)

    def test_a_full_disk_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "a.safetensors"
        made = compute_reference(dataset(12), PixelFeatures())
        made.save(path)
        before = path.read_bytes()

        def fail(descriptor):  # a full disk may show only when the bytes are forced to it
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match=r"can't write .*a\.safetensors: No space left on device; free some space"):
            made.save(path)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["a.safetensors"]

    @pytest.mark.parametrize("num_images", [1, 13])
    def test_number_of_images(self, num_images):
        with pytest.raises(ValueError, match=rf"num_images must be in 2\.\.12 .*got {num_images}"):
            compute_reference(dataset(12), PixelFeatures(), num_images)


class TestFloor:
    def test_disjoint_draws_of_real_images(self):
        network = PixelFeatures()
        made = compute_reference(dataset(200), network)
        floor = real_floor(made, dataset(100, seed=1, name="train"), network, 30, max_draws=5)
        assert len(floor.frechet) == len(floor.kernel) == 3  # three disjoint draws of 30 fit into 100
        assert len(set(floor.frechet)) == 3
        assert floor.frechet_mean == pytest.approx(np.mean(floor.frechet))
        assert network.num_images == 200 + 90
        assert floor.to_json()["num_images"] == 30

    def test_a_draw_is_scored_as_samples_are(self):
        network = PixelFeatures()
        made, train = compute_reference(dataset(200), network), dataset(40, seed=1)
        floor = real_floor(made, train, network, 40, max_draws=1)
        frechet, kernel = score_images(images_of(train), made, network)
        assert floor.frechet[0] == pytest.approx(frechet.value, rel=1e-6)
        assert floor.kernel[0] == pytest.approx(kernel.value, rel=1e-6, abs=1e-9)

    def test_refuses_the_reference_itself(self):
        data, network = dataset(40), PixelFeatures()
        with pytest.raises(ValueError, match="real images that are not in the reference"):
            real_floor(compute_reference(data, network), data, network, 20)

    def test_too_few_images(self):
        network = PixelFeatures()
        with pytest.raises(ValueError, match="the floor at 50 images needs as many real ones, the dataset has 40"):
            real_floor(compute_reference(dataset(60), network), dataset(40, seed=1), network, 50)


class TestScore:
    def scores(self, num_images: int = 30, **options) -> tuple[Score, Score]:
        network = PixelFeatures()
        made = compute_reference(dataset(60), network)
        return score_images(images_of(dataset(num_images, seed=2, scale=200)), made, network, **options)

    def test_names_and_values(self):
        network = PixelFeatures()
        made, images = compute_reference(dataset(60), network), images_of(dataset(30, seed=2, scale=200))
        frechet, kernel = score_images(images, made, network)
        assert (frechet.name, kernel.name) == ("fd_pixels", "kid_pixels")
        expected = frechet_distance(FeatureStatistics.from_features(network(images)), made.statistics)
        assert frechet.value == pytest.approx(expected)
        assert kernel.value == pytest.approx(kernel_distance(network(images), made.features))
        assert frechet.floor is kernel.floor is None

    def test_fingerprint_is_complete_and_json(self):
        sampling = Sampling("euler", 10, 1.0, seed=3, first_index=1000, ema=0.999)
        floor = Floor(30, (1.0, 3.0), (0.1, 0.3), "train")
        frechet, kernel = self.scores(floor=floor, sampling=sampling)
        assert (frechet.floor, kernel.floor) == (2.0, pytest.approx(0.2))
        data = json.loads(json.dumps(frechet.to_json()))
        assert data["fingerprint"]["network"] == {"name": "pixels", "sha256": "0123"}
        assert data["fingerprint"]["image_shape"] == [1, 6, 6]
        assert data["fingerprint"]["num_images"] == 30
        assert data["fingerprint"]["reference"]["num_images"] == 60
        assert data["fingerprint"]["reference"]["dataset"] == dataset(60).fingerprint
        assert len(data["fingerprint"]["reference"]["hash"]) == 64
        assert data["fingerprint"]["sampling"] == {
            "sampler": "euler",
            "num_steps": 10,
            "guidance": 1.0,
            "seed": 3,
            "first_index": 1000,
            "ema": 0.999,
        }
        restored = Score.from_json(data)
        assert restored.value == frechet.value
        restored.check_comparable(frechet)

    def test_scores_of_other_seeds_compare_others_dont(self):
        sampling = Sampling("euler", 10, 1.0, seed=3, ema=0.999)
        frechet, kernel = self.scores(sampling=sampling)
        frechet.check_comparable(self.scores(sampling=dataclasses.replace(sampling, seed=4, first_index=100))[0])
        for changed, entry in (
            ({"num_steps": 20}, "sampling.num_steps: 10 against 20"),
            ({"guidance": 2.0}, "sampling.guidance: 1.0 against 2.0"),
            ({"ema": None}, "sampling.ema: 0.999 against None"),
        ):
            with pytest.raises(ValueError, match=entry):
                frechet.check_comparable(self.scores(sampling=dataclasses.replace(sampling, **changed))[0])
        with pytest.raises(ValueError, match="num_images: 30 against 31"):
            frechet.check_comparable(self.scores(31, sampling=sampling)[0])
        with pytest.raises(ValueError, match="name: fd_pixels against kid_pixels"):
            frechet.check_comparable(kernel)

    def test_another_image_shape_is_refused(self):
        network = PixelFeatures()
        made = compute_reference(dataset(60), network)
        with pytest.raises(ValueError, match=r"image_shape: \[1, 4, 9\] against \[1, 6, 6\]"):
            score_images(torch.zeros(10, 1, 4, 9, dtype=torch.uint8), made, network)

    def test_another_network_is_refused(self):
        made = compute_reference(dataset(60), PixelFeatures())
        with pytest.raises(ValueError, match="network.sha256: 4567 against 0123"):
            score_images(images_of(dataset(10)), made, PixelFeatures("4567"))

    def test_a_floor_at_another_number_is_refused(self):
        with pytest.raises(ValueError, match="the floor was measured at 40 images, the score is at 30"):
            self.scores(floor=Floor(40, (1.0,), (0.1,), "train"))


class WithDim(PixelFeatures):
    def fingerprint(self) -> dict:
        return super().fingerprint() | {"dim": self.dim}


@pytest.mark.parametrize(
    ("num_reference", "num_samples", "said"),
    [
        (8, 30, "8 images of the reference are too few for a Frechet distance of 8 features"),
        (30, 8, "8 samples are too few"),
        (4, 5, "4 images of the reference and 5 samples are too few"),
        (9, 9, None),
    ],
)
def test_a_distance_from_too_few_images_says_so(num_reference, num_samples, said):
    """With no more images than features the covariance is singular; such scores looked like any other."""
    network = WithDim()
    made = compute_reference(dataset(num_reference), network)
    frechet, kernel = score_images(images_of(dataset(num_samples, seed=1)), made, network)
    assert "caution" not in kernel.to_json()  # it has no covariance
    assert (said is None) == ("caution" not in frechet.to_json())
    if said is not None:
        assert said in frechet.to_json()["caution"]
    assert Score.from_json(json.loads(json.dumps(frechet.to_json()))).to_json() == frechet.to_json()
