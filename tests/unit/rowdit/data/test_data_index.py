"""The order of samples is a function of (seed, position)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowdit import streams
from rowdit.data import ArrayDataset, batch_at, stream_indices, to_float
from rowdit.data import index as index_module
from rowdit.data.index import Blocks


def numbered(num: int = 7) -> ArrayDataset:
    """Image i is i everywhere but in its right column, which is 100 + i; its label is i."""
    images = np.empty((num, 1, 2, 3), np.uint8)
    images[:] = np.arange(num, dtype=np.uint8)[:, None, None, None]
    images[..., 2] += 100
    return ArrayDataset(images, np.arange(num), tuple("abcdefghijklmnop"[:num]), name="numbered")


def test_each_epoch_holds_each_sample_once_in_another_order():
    orders = stream_indices(3, 0, 5 * 50, 50).reshape(5, 50)
    assert (np.sort(orders, axis=1) == np.arange(50)).all()
    assert len({order.tobytes() for order in orders}) == 5


def test_another_seed_is_another_order():
    assert (stream_indices(0, 0, 50, 50) != stream_indices(1, 0, 50, 50)).any()


@settings(max_examples=50, deadline=None)
@given(start=st.integers(0, 60), count=st.integers(0, 60), num=st.integers(1, 12), seed=st.integers(0, 2**63))
def test_any_stretch_is_cut_from_one_stream(start, count, num, seed):
    stretch = stream_indices(seed, start, count, num)
    whole = stream_indices(seed, 0, start + count, num)
    assert stretch.dtype == np.int64
    assert (stretch == whole[start:]).all() and len(stretch) == count


def test_blocks_are_mixed_within_windows_and_each_sample_comes_once():
    blocks = Blocks(np.array([0, 3, 10, 14, 20, 31, 40]), window=2)
    orders = stream_indices(7, 0, 3 * 40, 40, blocks).reshape(3, 40)
    assert (np.sort(orders, axis=1) == np.arange(40)).all()
    assert len({order.tobytes() for order in orders}) == 3
    for order in orders:
        block_of = np.searchsorted(blocks.starts, order, side="right") - 1
        windows = []
        for block in block_of.tolist():
            if not windows or (block not in windows[-1] and len(windows[-1]) == 2):
                windows.append(set())
            windows[-1].add(block)
        assert [len(window) for window in windows] == [2, 2, 2]
        assert set.union(*windows) == set(range(6))
        in_window = order[: sum(block in windows[0] for block in block_of.tolist())]
        assert (np.diff(in_window) < 0).sum() > 1  # mixed, not two runs one after the other
    assert (stream_indices(7, 35, 20, 40, blocks) == orders.ravel()[35:55]).all()


def test_positions_far_out_cost_no_more():
    far = 10**12
    assert (stream_indices(0, far, 5, 1000)[2:] == stream_indices(0, far + 2, 3, 1000)).all()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_the_order_is_the_same_at_every_world_size(world_size):  # T4
    dataset = numbered()
    whole = batch_at(dataset, seed=5, images_seen=24, batch_size=12)
    shares = [
        batch_at(dataset, seed=5, images_seen=24, batch_size=12, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert {len(share.labels) for share in shares} == {12 // world_size}
    for part in ("images", "labels", "positions"):
        assert torch.equal(torch.cat([getattr(share, part) for share in shares]), getattr(whole, part))


def test_another_batch_size_cuts_the_same_stream_elsewhere():  # T7, T4
    dataset = numbered()
    whole = batch_at(dataset, seed=5, images_seen=0, batch_size=24)
    micro = [batch_at(dataset, seed=5, images_seen=seen, batch_size=3) for seen in range(0, 24, 3)]
    assert torch.equal(torch.cat([batch.labels for batch in micro]), whole.labels)
    assert torch.equal(torch.cat([batch.images for batch in micro]), whole.images)
    assert whole.positions.tolist() == list(range(24))


def test_seven_samples_on_four_ranks_give_equal_shares_for_ever():  # T15
    dataset = numbered(7)
    counts = np.zeros(7, int)
    for step in range(7):
        for rank in range(4):
            batch = batch_at(dataset, seed=0, images_seen=4 * step, batch_size=4, rank=rank, world_size=4)
            assert len(batch.labels) == 1
            counts[batch.labels.item()] += 1
    assert (counts == 4).all()  # 28 images are four whole epochs


def test_a_batch_holds_its_samples_as_numbers():
    dataset = numbered()
    batch = batch_at(dataset, seed=9, images_seen=14, batch_size=7)
    order = stream_indices(9, 14, 7, 7)
    images, labels = dataset.fetch(order)
    assert torch.equal(batch.images, to_float(images)) and batch.labels.tolist() == labels.tolist()
    assert batch.images.dtype == torch.float32 and batch.images.shape == (7, 1, 2, 3)
    assert batch.labels.dtype == batch.positions.dtype == torch.int64


def test_flips_follow_the_position_alone():
    dataset = numbered()
    plain = batch_at(dataset, seed=2, images_seen=0, batch_size=64)
    flipped = batch_at(dataset, seed=2, images_seen=0, batch_size=64, flip=True)
    expected = streams.uniform(2, "flip", plain.positions) < 0.5
    assert 16 < expected.sum() < 48
    for place in range(64):
        image = plain.images[place].flip(-1) if expected[place] else plain.images[place]
        assert torch.equal(flipped.images[place], image)
    again = batch_at(dataset, seed=2, images_seen=60, batch_size=4, flip=True)
    assert torch.equal(again.images, flipped.images[60:])
    assert torch.equal(flipped.labels, plain.labels)


def test_an_epochs_order_is_made_once():
    index_module._epoch_order.cache_clear()
    for seen in range(0, 1_000_000, 10_000):
        stream_indices(0, seen, 256, 1_281_167)
    assert index_module._epoch_order.cache_info().misses == 1


def test_the_cached_order_cannot_be_spoilt():
    first = stream_indices(0, 0, 10, 10)
    kept = first.copy()
    first[:] = 0
    assert (stream_indices(0, 0, 10, 10) == kept).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size 0"),
        ({"images_seen": -1}, "images_seen -1"),
        ({"batch_size": 10, "world_size": 4}, "10 can't be shared evenly by 4 ranks.*8 or 12"),
        ({"batch_size": 3, "world_size": 4}, "nearest batch sizes: 4$"),
        ({"rank": 2, "world_size": 2}, "rank 2"),
        ({"rank": -1}, "rank -1"),
        ({"world_size": 0}, "world_size 0"),
    ],
)
def test_arguments_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        batch_at(numbered(), **{"seed": 0, "images_seen": 0, "batch_size": 4, **changes})


def test_an_empty_dataset_and_negative_positions_are_refused():
    with pytest.raises(ValueError, match="num_samples 0"):
        stream_indices(0, 0, 1, 0)
    with pytest.raises(ValueError, match="start -1"):
        stream_indices(0, -1, 1, 5)
    with pytest.raises(ValueError, match="count -2"):
        stream_indices(0, 0, -2, 5)
