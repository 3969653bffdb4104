"""From images to scores: the same on any number of ranks and after a kill; mismatches refused (cases T20)."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch
from PIL import Image

from rowdit import streams
from rowdit.data import ArrayDataset, to_uint8
from rowdit.evaluate import FeatureStatistics, fingerprint, frechet_distance, kernel_distance
from rowdit.evaluate.evaluation import METRICS, reference_of, score, values
from rowdit.evaluate.extract import choose, extract
from rowdit.evaluate.images import ArrayImages, DatasetImages, FolderImages
from rowdit.evaluate.manifold import overlap
from rowdit.evaluate.networks import open_network, published_weights
from rowdit.evaluate.ranks import Ranks
from rowdit.evaluate.reference import Reference, compute_reference, published_moments


class Moments:
    """Six features of an image, with a fingerprint like a real network's."""

    name, sha256, dim = "moments", "0" * 64, 6
    calls: int

    def __init__(self, version: int = 1) -> None:
        self.version, self.calls = version, 0

    def __call__(self, images):
        self.calls += 1
        x = images.float().flatten(1) / 255
        halves = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        return torch.stack(
            [f(h) for h in halves for f in (lambda t: t.mean(1), lambda t: t.std(1), lambda t: t.amax(1))], 1
        )

    def fingerprint(self):
        return {"name": self.name, "sha256": self.sha256, "version": self.version}


def images(num: int, seed: int = 0, top: int = 255) -> DatasetImages:
    pixels = np.random.default_rng(seed).integers(0, top + 1, (num, 1, 6, 6), dtype=np.uint8)
    return DatasetImages(ArrayDataset(pixels, np.zeros(num, int), ("a",), name=f"noise-{seed}"))


def take(source, folder, num=None, network=None, **options):
    return extract(source, choose(len(source), num, "the test"), network or Moments(), folder, **options)


class TestExtract:
    def test_features_in_order_and_kept(self, tmp_path):
        source, network = images(1100), Moments()
        got = take(source, tmp_path, network=network)
        assert torch.equal(got.features, Moments()(torch.from_numpy(source.fetch(np.arange(1100)))))
        assert network.calls == 3, "parts of 500"
        assert torch.equal(take(source, tmp_path, network=network).features, got.features) and network.calls == 3
        take(images(1100, seed=1), tmp_path, network=network)
        take(source, tmp_path, network=Moments(version=2))
        assert len(list(tmp_path.iterdir())) == 3, "another dataset and another network have folders of their own"

    def test_any_number_of_ranks(self, tmp_path):
        source = images(2300)
        whole = take(source, tmp_path / "one")

        class InTurn(Ranks):
            """Rank 0 comes last here, and sees the folder as it was before any of them began."""

            def from_first(self, value):
                return list(range(5))

            def wait(self):
                pass

        for rank in (2, 1, 0):
            got = take(source, tmp_path / "three", ranks=InTurn(rank, 3))
            assert (got is None) == (rank > 0)
        assert torch.equal(got.features, whole.features) and got.dataset == whole.dataset

    def test_after_a_full_disk_and_a_half_written_part(self, tmp_path, monkeypatch):
        source, calls = images(1600), []
        fsync = fingerprint.os.fsync

        def full_at_the_third(descriptor):
            calls.append(descriptor)
            if len(calls) == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(fingerprint.os, "fsync", full_at_the_third)
            with pytest.raises(OSError, match=r"part-00002.safetensors: No space left"):
                take(source, tmp_path)
        (home,) = tmp_path.iterdir()
        assert sorted(path.name for path in home.iterdir()) == ["part-00000.safetensors", "part-00001.safetensors"]
        (home / ".part-00002.safetensors.99.partial").write_bytes(b"half")
        network = Moments()
        got = take(source, tmp_path, network=network)
        assert network.calls == 2
        assert torch.equal(got.features, take(source, tmp_path / "anew").features)

    def test_a_part_of_something_else(self, tmp_path):
        take(images(600), tmp_path / "a")
        take(images(600, seed=1), tmp_path / "b")
        (ours,), (theirs,) = (tmp_path / "a").iterdir(), (tmp_path / "b").iterdir()
        (ours / "part-00001.safetensors").write_bytes((theirs / "part-00001.safetensors").read_bytes())
        with pytest.raises(ValueError, match=r"part-00001.safetensors holds other features; delete"):
            take(images(600), tmp_path / "a")

    def test_the_line_that_stands_for_the_images(self, tmp_path):
        source = images(40)
        assert take(source, tmp_path).dataset == source.identity
        part = take(source, tmp_path, 30).dataset
        assert part.startswith(f"{source.identity}:30 of them:sha256-")
        np.save(tmp_path / "a.npy", source.fetch(np.arange(40)).transpose(0, 2, 3, 1))
        np.savez(tmp_path / "b.npz", x=source.fetch(np.arange(40)))
        from_npy = take(ArrayImages(tmp_path / "a.npy"), tmp_path).dataset
        assert from_npy == take(ArrayImages(tmp_path / "b.npz"), tmp_path).dataset, "the same pixels, wherever they lie"
        assert from_npy.startswith("images:40x1x6x6:as they are:sha256-")

    def test_choosing(self):
        assert choose(5, None, "x").tolist() == [0, 1, 2, 3, 4]
        assert choose(100, 3, "x", first=True).tolist() == [0, 1, 2]
        drawn = choose(1000, 100, "x")
        assert len(set(drawn.tolist())) == 100 and (np.diff(drawn) > 0).all() and drawn[-1] > 800
        with pytest.raises(ValueError, match="7 images of the target were asked for; it must be 2..5"):
            choose(5, 7, "the target")
        with pytest.raises(ValueError, match="1 images"):
            choose(5, 1, "the target")


class TestScores:
    def test_every_metric_by_its_own_function(self, tmp_path):
        real, samples = take(images(700), tmp_path), take(images(600, seed=1, top=200), tmp_path)
        reference = reference_of(real)
        got = values(samples.features, reference)
        assert tuple(got) == METRICS
        statistics = [FeatureStatistics.from_features(one.features) for one in (samples, real)]
        assert got["fd"] == pytest.approx(frechet_distance(*statistics), rel=1e-9)
        assert got["kid"] == pytest.approx(
            kernel_distance(samples.features, reference.features, subset_size=1000, num_subsets=10, seed=0)
        )
        neighbours = overlap(reference.features[:600], samples.features)
        assert [got[name] for name in METRICS[2:]] == [getattr(neighbours, name) for name in METRICS[2:]]

    def test_same_images_score_best(self, tmp_path):
        real = take(images(700), tmp_path)
        got = values(real.features, reference_of(real))
        assert got["fd"] == pytest.approx(0, abs=1e-9) and got["precision"] == got["recall"] == got["coverage"] == 1

    def test_the_same_hundred_images_have_one_score(self, tmp_path):
        """T20: one formula from numbers to bytes, and after it the way doesn't matter; another formula is seen."""
        reference = reference_of(take(images(700), tmp_path))
        x = torch.randn(100, 1, 6, 6, generator=torch.Generator().manual_seed(0)) * 0.6
        pixels = to_uint8(x).numpy()
        dataset = DatasetImages(ArrayDataset(pixels, np.zeros(100, int), ("a",), name="x"))
        np.savez(tmp_path / "x.npz", arr_0=pixels.transpose(0, 2, 3, 1))
        for i, image in enumerate(pixels):
            (tmp_path / "x").mkdir(exist_ok=True)
            Image.fromarray(image[0]).save(tmp_path / "x" / f"{i:03d}.png")
        ways = (dataset, ArrayImages(tmp_path / "x.npz"), FolderImages(tmp_path / "x"))
        scores = [values(take(source, tmp_path).features, reference) for source in ways]
        assert scores[0] == scores[1] == scores[2]
        truncated = ((x + 1) / 2 * 255).clamp(0, 255).to(torch.uint8)
        assert values(Moments()(truncated), reference)["fd"] != scores[0]["fd"]

    def test_the_fingerprint(self, tmp_path):
        real, samples = take(images(700), tmp_path), take(images(600, seed=1), tmp_path)
        made_by = {"sampler": "dpm", "seed": 0}
        scores = score(samples, reference_of(real), ("fd", "recall"), floor={"fd": 0.1}, made_by=made_by)
        assert [one.name for one in scores] == ["fd_moments", "recall_moments"]
        assert [one.floor for one in scores] == [0.1, None]
        print_ = scores[1].fingerprint
        assert print_["reference"]["dataset"] == real.dataset and print_["reference"]["num_images"] == 700
        assert print_["num_images"] == 600 and print_["image_shape"] == [1, 6, 6] and print_["sampling"] == made_by
        assert print_["distance"] == {"kind": "manifold", "k": 3, "k_density": 5, "num_of_each": 600}
        scores[0].check_comparable(score(samples, reference_of(real), ("fd",), made_by=made_by | {"seed": 7})[0])
        with pytest.raises(ValueError, match="sampling.sampler: dpm against heun"):
            scores[0].check_comparable(score(samples, reference_of(real), ("fd",), made_by={"sampler": "heun"})[0])
        other = reference_of(take(images(700, seed=5), tmp_path))
        with pytest.raises(ValueError, match="reference.dataset: .*noise-0.* against .*noise-5"):
            scores[0].check_comparable(score(samples, other, ("fd",), made_by=made_by)[0])

    def test_another_network_or_size_is_refused(self, tmp_path):
        reference = reference_of(take(images(700), tmp_path))
        with pytest.raises(ValueError, match="network.version: 2 against 1"):
            score(take(images(600), tmp_path, network=Moments(2)), reference)
        large = DatasetImages(ArrayDataset(np.zeros((600, 1, 8, 8), np.uint8), np.zeros(600, int), ("a",), name="x"))
        with pytest.raises(ValueError, match=r"image_shape: \[1, 8, 8\] against \[1, 6, 6\]"):
            score(take(large, tmp_path), reference)

    def test_too_few_images_for_a_covariance(self, tmp_path):
        reference = reference_of(take(images(700), tmp_path))
        few = take(images(6, seed=1), tmp_path)
        with pytest.raises(ValueError, match=r"6 images are too few .* of 6 features.*--metrics kid"):
            values(few.features, reference)
        assert set(values(few.features, reference, ("kid", "precision"))) == {"kid", "precision"}
        with pytest.raises(ValueError, match="6 images of the reference are too few"):
            values(reference.features, reference_of(few))
        with pytest.raises(ValueError, match="there is no metric 'fid'; there are fd, kid"):
            values(few.features, reference, ("fid",))

    def test_statistics_in_a_file(self, tmp_path):
        reference, samples = reference_of(take(images(700), tmp_path)), take(images(600, seed=1), tmp_path)
        reference.save(tmp_path / "real.safetensors")
        again = Reference.load(tmp_path / "real.safetensors")
        assert again.hash == reference.hash
        assert values(samples.features, again) == values(samples.features, reference)

    def test_moments_that_others_published(self, tmp_path):
        real, samples = take(images(700), tmp_path), take(images(600, seed=1, top=200), tmp_path)
        statistics = FeatureStatistics.from_features(real.features)
        np.savez(tmp_path / "m.npz", mu=statistics.mean.numpy(), sigma=statistics.covariance.numpy(), arr_0=np.zeros(3))
        reference = published_moments(tmp_path / "m.npz")
        (fd,) = score(samples, reference, ("fd",))
        assert fd.value == pytest.approx(values(samples.features, reference_of(real), ("fd",))["fd"], rel=1e-12)
        assert fd.fingerprint["reference"]["dataset"].startswith("moments:m.npz:sha256-")
        with pytest.raises(ValueError, match="no features: only fd can be measured, --metrics fd"):
            values(samples.features, reference, ("fd", "kid"))
        with pytest.raises(ValueError, match="have no fingerprint to be kept with"):
            reference.save(tmp_path / "x.safetensors")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ({"mu": np.zeros(3)}, "it holds mu, but no sigma"),
            ({"mu": np.zeros(3), "sigma": np.zeros((3, 4))}, r"shapes \(3,\) and \(3, 4\)"),
            ({"mu": np.full(2, np.nan), "sigma": np.eye(2)}, "aren't finite"),
            ({"mu": np.zeros(2), "sigma": np.array([[1.0, 2.0], [0.0, 1.0]])}, "isn't symmetric"),
        ],
    )
    def test_moments_that_are_none(self, tmp_path, content, message):
        np.savez(tmp_path / "m.npz", **content)
        with pytest.raises(ValueError, match=rf"m.npz holds no moments \(mu and sigma in an npz\): .*{message}"):
            published_moments(tmp_path / "m.npz")
        (tmp_path / "n.npz").write_bytes(b"PK")
        with pytest.raises(ValueError, match="n.npz holds no moments"):
            published_moments(tmp_path / "n.npz")

    def test_what_is_kept_of_many_features_is_a_random_draw(self, tmp_path, monkeypatch):
        """A dataset sorted by class: its first images would be of the first classes alone."""
        monkeypatch.setattr("rowdit.evaluate.reference.MAX_STORED_FEATURES", 100)
        source = images(2000)
        real = take(source, tmp_path)
        reference = reference_of(real)
        expected = np.sort(streams.permutation(0, "reference_features", 0, 2000)[:100])
        assert torch.equal(reference.features, real.features[torch.from_numpy(expected)]) and expected[-1] > 1900
        assert reference.fingerprint["features"] == "a random 100"
        other_way = compute_reference(source.dataset, Moments())
        assert torch.equal(other_way.features, reference.features) and other_way.hash == reference.hash


def test_networks_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_network("effnet_lite0", batch_size=8).batch_size == 8
    for name in ("inception", "inception_pytorch_fid", "dinov2_vitl14"):
        assert published_weights(name).cached.parent == tmp_path / "rowdit" / "weights"
        with pytest.raises(FileNotFoundError, match="--download"):
            open_network(name)
    assert published_weights("effnet_lite0") is None
    with pytest.raises(ValueError, match="there is no feature network 'vgg'; there are effnet_lite0"):
        open_network("vgg")
