"""The two rules of resizing."""

from __future__ import annotations

import numpy as np
import pytest

from rowdit.data.resize import area_mean, resize_rule, resize_square


def random_images(size: int = 28) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (5, 2, size, size), np.uint8)


def test_the_area_mean_rounds_half_up():
    images = np.array([[0, 1, 3, 3], [0, 1, 3, 2], [255, 255, 0, 0], [255, 255, 0, 1]], np.uint8)
    assert area_mean(images, 2).tolist() == [[1, 3], [255, 0]]  # means 0.5, 2.75, 255, 0.25


@pytest.mark.parametrize("size", [14, 7, 4, 2, 1])
def test_sizes_that_divide_the_old_one_are_means_over_squares(size):
    images, factor = random_images(), 28 // size
    resized = resize_square(images, size)
    assert resized.shape == (5, 2, size, size) and resized.dtype == np.uint8
    for row, column in np.ndindex(size, size):
        square = images[:, :, row * factor : (row + 1) * factor, column * factor : (column + 1) * factor]
        mean = square.reshape(5, 2, -1).astype(float).mean(axis=-1)
        assert (resized[:, :, row, column] == np.floor(mean + 0.5)).all()
    assert resize_rule(28, size) == "area"


@pytest.mark.parametrize("size", [16, 20, 27, 32, 56, 9])
def test_other_sizes_keep_flat_images_flat_and_the_mean_of_others(size):
    flat = np.full((1, 1, 28, 28), 77, np.uint8)
    assert (resize_square(flat, size) == 77).all()
    ramp = np.tile(np.arange(28, dtype=np.uint8) * 9, (1, 1, 28, 1))
    resized = resize_square(ramp, size).astype(int)
    assert resized.shape == (1, 1, size, size)
    assert abs(resized.mean() - ramp.mean()) < 1
    assert (np.diff(resized, axis=-1) >= 0).all()
    assert (resized == resized[:, :, :1]).all()
    assert resize_rule(28, size) == "bicubic"


def test_a_reduction_averages_instead_of_picking_pixels():
    stripes = np.tile(np.array([0, 255], np.uint8), (1, 1, 28, 14))
    assert abs(resize_square(stripes, 10).astype(int) - 127.5).max() < 30


def test_the_native_size_is_left_alone():
    images = random_images()
    assert resize_square(images, 28) is images
    assert resize_rule(28, 28) == "native"


def test_no_size_is_refused():
    with pytest.raises(ValueError, match="image_size 0"):
        resize_square(random_images(), 0)
