"""Folders that no one prepared, where they are at hand; `-m slow` runs these.

npm pack emoji-datasource-google@16.0.0 && tar xzf emoji-datasource-google-16.0.0.tgz
ROWDIT_EMOJI=$PWD/package                       3,786 PNGs of 64 x 64, RGBA, LA and palette, in ten categories

apt-get download openclipart-png && dpkg -x openclipart-png_*.deb clipart
ROWDIT_OPENCLIPART=$PWD/clipart/usr/share/openclipart/png
                                                6,900 drawings of all sizes and modes; symbolic links
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rowdit.data import ImageFolder, Loader, batch_at, open_dataset
from rowdit.encode import EncodeOptions, IdentityEncoder, encode_split

pytestmark = pytest.mark.slow


def folder_of(variable: str) -> Path:
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"{variable} names no folder; the module's docstring says how to get it")
    return Path(folder)


@pytest.fixture(scope="module")
def emoji(tmp_path_factory) -> Path:
    """A folder of links, one sub-folder a category."""
    package = folder_of("ROWDIT_EMOJI")
    root = tmp_path_factory.mktemp("emoji")
    for entry in json.loads((package / "emoji.json").read_text()):
        (root / entry["category"]).mkdir(exist_ok=True)
        for one in (entry, *(entry.get("skin_variations") or {}).values()):
            os.symlink(package / "img/google/64" / one["image"], root / entry["category"] / one["image"])
    return root


def over_white(path: Path) -> np.ndarray:
    """(H, W, 3) bytes by arithmetic: a c + (1 - a) 255, rounded."""
    image = np.asarray(Image.open(path).convert("RGBA")).astype(np.float64)
    alpha = image[..., 3:] / 255
    return np.rint(alpha * image[..., :3] + (1 - alpha) * 255)


def test_emoji_are_ten_classes_of_pictures_on_white(emoji):
    dataset = ImageFolder(emoji, 64)
    assert len(dataset) == 3786 and dataset.num_classes == 10 and "Animals & Nature" in dataset.class_names
    images, labels = dataset.fetch(np.arange(len(dataset)))
    assert not dataset.bad_files and np.bincount(labels).min() == 5
    modes = set()
    for row in range(0, len(dataset), 37):
        path = emoji / dataset.files[row]
        modes.add(Image.open(path).mode)
        assert np.abs(images[row].transpose(1, 2, 0) - over_white(path)).max() <= 1
    assert modes == {"RGBA", "P", "LA"}


def test_emoji_as_tar_parquet_and_latents_are_the_same_stream(emoji, tmp_path, monkeypatch):
    webdataset = pytest.importorskip("webdataset")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = ImageFolder(emoji, 32)
    (tmp_path / "tar").mkdir()
    with webdataset.ShardWriter(str(tmp_path / "tar" / "%04d.tar"), maxcount=541, verbose=0) as sink:
        for row, (file, label) in enumerate(zip(folder.files, folder.labels.tolist(), strict=True)):
            sink.write({"__key__": f"{row:05d}", "png": (emoji / file).read_bytes(), "cls": label})
    columns = {"image": [(emoji / file).read_bytes() for file in folder.files], "label": folder.labels}
    (tmp_path / "parquet").mkdir()
    parquet.write_table(pyarrow.table(columns), tmp_path / "parquet" / "all.parquet", row_group_size=100)
    for rank in (1, 0):
        encode_split(
            folder, IdentityEncoder(), tmp_path / "latents" / "train", EncodeOptions(), rank=rank, world_size=2
        )
    others = [
        open_dataset(f"tar:{tmp_path / 'tar'}", image_size=32, part="all"),
        open_dataset(f"parquet:{tmp_path / 'parquet'}", image_size=32, part="all"),
        open_dataset(f"latents:{tmp_path / 'latents'}"),
    ]
    expected = batch_at(folder, seed=3, images_seen=3700, batch_size=256, flip=True)  # over the end of an epoch
    for dataset in others:
        with Loader(dataset, seed=3, images_seen=3700, batch_size=256, flip=True, num_workers=2) as loader:
            batch = next(loader)
        assert torch.equal(batch.images, expected.images) and torch.equal(batch.labels, expected.labels)


def test_clip_art_of_all_sizes_is_read_or_listed():
    root = folder_of("ROWDIT_OPENCLIPART")
    dataset = ImageFolder(root, 32, bad_images="skip")
    assert len(dataset) > 6000
    # What is left out is too large or damaged; nothing raised something else.
    assert all("pixels, more than max_pixels" in why or "truncated" in why for why in dataset.bad_files.values())
    assert len(dataset.bad_files) < 30
