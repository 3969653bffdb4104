"""The bundled subset, and the full set in a folder."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from rowdit.data import DataError, Dataset, fashion_mnist, make_bundled

FULL_FOLDER = fashion_mnist.find_full()
needs_full = pytest.mark.skipif(FULL_FOLDER is None, reason="the full Fashion-MNIST isn't on this machine")


def idx(values: np.ndarray) -> bytes:
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(np.uint8).tobytes()


def write_set(folder: Path, images: np.ndarray, labels: np.ndarray, *, packed: bool = True) -> None:
    folder.mkdir(exist_ok=True)
    for names in fashion_mnist.IDX_FILES.values():
        for name, values in zip(names, (images, labels), strict=True):
            path = folder / (name if packed else name.removesuffix(".gz"))
            path.write_bytes(gzip.compress(idx(values)) if packed else idx(values))


@pytest.fixture
def small_set() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).integers(0, 256, (12, 28, 28), np.uint8), np.arange(12) % 10


@pytest.mark.parametrize(("split", "num"), [("train", 12_000), ("reference", 2_000)])
def test_the_bundled_subset_is_there_and_balanced(split, num):
    dataset = fashion_mnist.bundled(split)
    assert isinstance(dataset, Dataset)
    assert len(dataset) == num and dataset.image_shape == (1, 28, 28)
    assert dataset.num_classes == len(dataset.class_names) == 10
    images, labels = dataset.fetch(np.arange(num))
    assert images.dtype == np.uint8 and images.shape == (num, 1, 28, 28)
    assert (np.bincount(labels) == num // 10).all()
    assert (np.bincount(labels[:100]) == 10).all()  # a part from the beginning is balanced too
    assert 60 < images.mean() < 90  # of the whole training set: 72.9
    assert len(np.unique(images.reshape(num, -1), axis=0)) > 0.999 * num


def test_classes_look_like_what_their_names_say():
    images, labels = fashion_mnist.bundled("reference").fetch(np.arange(2000))
    middle = images[:, 0, :, 13:15].astype(float).mean(axis=(1, 2))
    upper = images[:, 0, :8].astype(float).mean(axis=(1, 2))
    names = fashion_mnist.CLASS_NAMES
    assert middle[labels == names.index("Trouser")].mean() < middle[labels == names.index("Dress")].mean() - 40
    assert upper[labels == names.index("Sneaker")].mean() < 5 < 60 < upper[labels == names.index("Coat")].mean()


def test_half_size_is_the_mean_of_two_by_two_pixels():
    places = np.arange(50)
    full_size = fashion_mnist.bundled("reference").fetch(places)[0].astype(int)
    halves = fashion_mnist.bundled("reference", image_size=14).fetch(places)[0]
    total = sum(full_size[:, :, row::2, column::2] for row in (0, 1) for column in (0, 1))
    assert (halves == (total + 2) // 4).all()


def test_the_fingerprint_says_what_the_images_are():
    marks = [
        fashion_mnist.bundled("reference", size).fingerprint for size in (28, 14, 20)
    ] + [fashion_mnist.bundled("train", 14).fingerprint]  # fmt: skip
    assert [mark.split(":")[2] for mark in marks] == ["native", "area", "bicubic", "area"]
    assert marks[0].startswith("fashion-mnist-bundled/reference:2000x1x28x28:native:sha256-a9a3fef60943d6c2")
    assert len(set(marks)) == 4


def test_a_damaged_asset_is_refused(monkeypatch):
    name, num_columns, num_per_class, _ = fashion_mnist.SHEETS["reference"]
    fashion_mnist._bundled_images.cache_clear()
    monkeypatch.setitem(fashion_mnist.SHEETS, "reference", (name, num_columns, num_per_class, "0" * 64))
    with pytest.raises(DataError, match=f"{name}.*wrong sha256.*reinstall"):
        fashion_mnist.bundled("reference")
    monkeypatch.setitem(fashion_mnist.SHEETS, "reference", ("FASHION_MNIST_LICENSE.txt", 40, 200, "0" * 64))
    with pytest.raises(DataError, match="can't be read.*reinstall"):
        fashion_mnist.bundled("reference")


def test_the_notice_lies_beside_the_images():
    assets = Path(fashion_mnist.__file__).parent / "assets"
    notice = (assets / "FASHION_MNIST_LICENSE.txt").read_text()
    assert "Zalando SE" in notice and "Permission is hereby granted" in notice
    assert sum(path.stat().st_size for path in assets.iterdir()) < 6e6


def test_the_subset_is_dealt_class_by_class():
    labels = np.array([1, 0, *range(2, 10), *range(10), *range(10)])
    images = np.arange(30, dtype=np.uint8)[:, None, None, None] * np.ones((1, 1, 28, 28), np.uint8)
    chosen = make_bundled.select(images, labels, 2)[:, 0, 0, 0]
    assert chosen.tolist() == [1, 0, *range(2, 10), *range(10, 20)]
    sheet = make_bundled.sheet(images, 6)
    assert sheet.shape == (5 * 28, 6 * 28)
    assert sheet[28 * 2 + 5, 28 * 3 + 7] == 2 * 6 + 3


@needs_full
def test_the_bundled_subset_can_be_made_again_from_the_full_set():
    for split, (_, _, num_per_class, sha256) in fashion_mnist.SHEETS.items():
        source = fashion_mnist.full(FULL_FOLDER, split)
        chosen = make_bundled.select(source.images, source.labels, num_per_class)
        assert hashlib.sha256(chosen.tobytes()).hexdigest() == sha256
        assert (chosen == fashion_mnist.bundled(split).images).all()


@needs_full
def test_the_published_full_set_opens():
    dataset = fashion_mnist.full(split="reference", image_size=14)
    assert len(dataset) == 10_000 and dataset.image_shape == (1, 14, 14)
    assert dataset.fetch(np.arange(5))[1].tolist() == [9, 2, 1, 1, 6]
    assert dataset.fingerprint.startswith("fashion-mnist/reference:10000x1x14x14:area:")


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_are_read_packed_or_not(tmp_path, small_set, packed):
    images, labels = small_set
    write_set(tmp_path, images, labels, packed=packed)
    dataset = fashion_mnist.full(tmp_path, "reference", check=False)
    assert (dataset.images[:, 0] == images).all() and (dataset.labels == labels).all()


def test_another_set_under_the_same_names_is_refused_unless_asked_for(tmp_path, small_set):
    write_set(tmp_path, *small_set)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz isn't the published file.*check=False"):
        fashion_mnist.full(tmp_path)
    one = fashion_mnist.full(tmp_path, check=False).fingerprint
    images = small_set[0].copy()
    images[3, 4, 5] ^= 1
    write_set(tmp_path, images, small_set[1])
    assert fashion_mnist.full(tmp_path, check=False).fingerprint != one


def test_a_label_out_of_range_names_its_file(tmp_path, small_set):  # T16
    images, labels = small_set
    write_set(tmp_path, images, np.where(labels == 3, 10, labels))
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz: label 10 \(image 3"):
        fashion_mnist.full(tmp_path, check=False)


IMAGES_NAME = "train-images-idx3-ubyte.gz"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(idx(np.zeros((2, 28, 28))))[:-20], "can't be read"),
        (b"<html>not found</html>", "can't be read"),
        (gzip.compress(b""), "begins with nothing"),
        (gzip.compress(b"\x00\x00\x0d\x03" + b"\0" * 100), "begins with 00 00 0d 03"),
        (gzip.compress(idx(np.zeros(5))), "3 dimension"),
        (gzip.compress(idx(np.zeros((2, 28, 28))) + b"x"), r"header says \(2, 28, 28\), that is 1568 bytes, but 1569"),
        (gzip.compress(idx(np.zeros((0, 28, 28)))), r"header says \(0, 28, 28\)"),
        (gzip.compress(idx(np.zeros((12, 20, 28)))), r"shape \(12, 20, 28\)"),
        (gzip.compress(idx(np.zeros((11, 28, 28)))), "12 labels"),
    ],
    ids=["cut", "html", "empty", "floats", "labels", "too_long", "no_images", "other_size", "other_number"],
)
def test_damaged_idx_files_are_refused_by_name(tmp_path, small_set, content, message):
    write_set(tmp_path, *small_set)
    (tmp_path / IMAGES_NAME).write_bytes(content)
    with pytest.raises(DataError, match=f"(?s){IMAGES_NAME}.*{message}"):
        fashion_mnist.full(tmp_path, check=False)


def test_missing_files_and_folders_show_the_way_out(tmp_path, monkeypatch, small_set):
    with pytest.raises(DataError, match="doesn't exist.*t10k-labels"):
        fashion_mnist.full(tmp_path / "nowhere")
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "debian")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(DataError, match="rowdit data get fashion-mnist"):
        fashion_mnist.full()
    fashion_mnist.cache_folder().mkdir(parents=True)
    write_set(fashion_mnist.cache_folder(), *small_set)
    assert len(fashion_mnist.full(check=False)) == 12
    (tmp_path / "debian").mkdir()
    write_set(tmp_path / "debian", small_set[0][:5], small_set[1][:5])
    assert len(fashion_mnist.full(check=False)) == 5  # Debian's goes first
    (tmp_path / "debian" / IMAGES_NAME).unlink()
    assert len(fashion_mnist.full(check=False)) == 12


def test_an_unknown_split_or_size_is_refused():
    for opening in (fashion_mnist.bundled, lambda split="train", size=28: fashion_mnist.full(None, split, size)):
        with pytest.raises(ValueError, match="'test' is not one of train, reference"):
            opening("test")
    with pytest.raises(ValueError, match="image_size 0"):
        fashion_mnist.bundled("train", 0)
