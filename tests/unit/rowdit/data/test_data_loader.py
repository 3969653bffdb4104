"""Worker processes change when images are read, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from rowdit.data import ArrayDataset, Batch, ImageFolder, Loader, batch_at
from rowdit.data.decode import BadImageError


def numbered(num_images: int = 10) -> ArrayDataset:
    """Image i has value i everywhere."""
    images = np.arange(num_images, dtype=np.uint8)[:, None, None, None] * np.ones((1, 1, 2, 2), np.uint8)
    return ArrayDataset(images, np.arange(num_images) % 2, ("a", "b"), name="numbered")


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("images", "labels", "positions"))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_batches_are_those_of_batch_at_from_any_place_on(num_workers):
    dataset = numbered()
    with Loader(dataset, seed=3, images_seen=12, batch_size=4, flip=True, num_workers=num_workers) as loader:
        for step in range(7):  # over the end of two epochs
            assert loader.images_seen == 12 + 4 * step
            expected = batch_at(dataset, seed=3, images_seen=12 + 4 * step, batch_size=4, flip=True)
            assert same(next(loader), expected)


def test_ranks_with_workers_share_one_stream():
    dataset = numbered()
    whole = batch_at(dataset, seed=3, images_seen=6, batch_size=6)
    shares = []
    for rank in range(3):
        with Loader(dataset, seed=3, images_seen=6, batch_size=6, rank=rank, world_size=3, num_workers=rank % 2) as one:
            shares.append(next(one))
    assert torch.equal(torch.cat([share.positions for share in shares]), whole.positions)
    assert torch.equal(torch.cat([share.images for share in shares]), whole.images)


def test_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    with Loader(numbered(), seed=0, images_seen=0, batch_size=2, num_workers=1) as loader:
        next(loader)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_workers": -1}, "num_workers -1"),
        ({"prefetch": 0}, "prefetch 0"),
        ({"images_seen": -1}, "images_seen -1"),
        ({"batch_size": 10, "world_size": 4}, "can't be shared evenly by 4 ranks; nearest batch sizes: 8 or 12"),
    ],
)
def test_bad_arguments_are_refused_before_a_worker_starts(changes, message):
    with pytest.raises(ValueError, match=message):
        Loader(numbered(), **{"seed": 0, "images_seen": 0, "batch_size": 4, **changes})


@pytest.fixture
def folder(tmp_path):
    """One class of six images, the second of which is damaged."""
    (tmp_path / "a").mkdir()
    for i in range(6):
        Image.new("L", (4, 4), 10 * i).save(tmp_path / "a" / f"{i}.png")
    (tmp_path / "a" / "1.png").write_bytes(b"no image")
    return tmp_path


def test_bad_images_that_workers_met_are_counted_here(folder):
    dataset = ImageFolder(folder, 4, bad_images="replace")
    with Loader(dataset, seed=0, images_seen=0, batch_size=6, num_workers=2) as loader:
        for _ in range(4):
            next(loader)
    assert list(dataset.bad_files) == ["a/1.png"]
    assert dataset.num_replaced == 4


def test_a_bad_image_in_a_worker_is_the_same_error(folder):
    dataset = ImageFolder(folder, 4)
    with (
        Loader(dataset, seed=0, images_seen=0, batch_size=6, num_workers=1) as loader,
        pytest.raises(BadImageError, match="1.png"),
    ):
        next(loader)
