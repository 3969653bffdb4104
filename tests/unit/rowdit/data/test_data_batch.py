"""Batches, the formula between bytes and numbers, and the checks at the door."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rowdit.data import ArrayDataset, DataError, Dataset, check_image_size, check_labels, to_float, to_uint8


def test_all_bytes_survive_the_way_to_numbers_and_back():
    every_byte = np.arange(256, dtype=np.uint8)
    numbers = to_float(every_byte)
    assert numbers.dtype == torch.float32
    assert numbers[0] == -1 and numbers[255] == 1
    assert torch.equal(to_uint8(numbers), torch.from_numpy(every_byte))


def test_to_float_is_the_stated_formula():
    every_byte = torch.arange(256, dtype=torch.uint8)
    expected = every_byte.double() / 127.5 - 1
    assert (to_float(every_byte).double() - expected).abs().max() < 1e-7  # fp32 rounding of numbers up to 1


def test_to_uint8_rounds_and_clips():
    steps = torch.tensor([-3.0, -1.0 - 1e-6, 0.4 / 127.5 - 1, 0.6 / 127.5 - 1, 1.0, 1.1, torch.inf, -torch.inf])
    assert to_uint8(steps).tolist() == [0, 0, 0, 1, 255, 255, 255, 0]


def test_half_precision_samples_are_rounded_in_full_precision():
    x = torch.tensor([0.7], dtype=torch.bfloat16)
    assert to_uint8(x).item() == round((x.item() + 1) * 127.5)


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match="float32"):
        to_float(np.zeros(3, np.float32))
    with pytest.raises(TypeError, match="uint8"):
        to_uint8(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="NaN.*diverged"):
        to_uint8(torch.tensor([0.0, torch.nan]))


def make_dataset(num: int = 4, **changes) -> ArrayDataset:
    images = np.arange(num * 4, dtype=np.uint8).reshape(num, 1, 2, 2)
    arguments = {"images": images, "labels": np.arange(num) % 2, "class_names": ("a", "b"), "name": "toy", **changes}
    return ArrayDataset(**arguments)


def test_array_dataset_is_a_dataset():
    dataset = make_dataset()
    assert isinstance(dataset, Dataset)
    images, labels = dataset.fetch(np.array([2, 0, 2]))
    assert images[:, 0, 0, 0].tolist() == [8, 0, 8]
    assert labels.tolist() == [0, 0, 0] and labels.dtype == np.int64
    with pytest.raises(IndexError, match="-1"):
        dataset.fetch(np.array([0, -1]))
    with pytest.raises(IndexError, match=r"0\.\.3"):
        dataset.fetch(np.array([4]))


def test_fetched_images_are_the_callers_own():
    dataset = make_dataset()
    dataset.fetch(np.array([0]))[0][:] = 99
    assert dataset.fetch(np.array([0]))[0].max() == 3


def test_the_fingerprint_follows_content_labels_and_name():
    images = make_dataset().images.copy()
    images[0, 0, 0, 0] += 1
    marks = {
        make_dataset().fingerprint,
        make_dataset(images=images).fingerprint,
        make_dataset(labels=np.zeros(4, int)).fingerprint,
        make_dataset(name="other").fingerprint,
        make_dataset(3).fingerprint,
    }
    assert len(marks) == 5
    assert make_dataset().fingerprint == make_dataset(labels=np.array([0, 1, 0, 1], np.uint8)).fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": np.zeros((4, 1, 2, 2), np.float32)}, "uint8.*float32"),
        ({"images": np.zeros((4, 2, 2), np.uint8)}, r"\(N, C, H, W\).*\(4, 2, 2\)"),
        ({"images": np.zeros((0, 1, 2, 2), np.uint8), "labels": np.zeros(0, int)}, "none of them 0"),
        ({"labels": np.zeros(3, int)}, r"4 images.*\(3,\)"),
        ({"labels": np.array([0, 1, 2, 1])}, r"toy: label 2 \(image 2; 1 such labels\).*0\.\.1"),
        ({"labels": np.array([0, -1, 0, 1])}, r"label -1 \(image 1"),
        ({"labels": np.zeros(4)}, "integers, not float64"),
    ],
)
def test_unusable_arrays_are_refused_by_name(changes, message):
    with pytest.raises(DataError, match=message):
        make_dataset(**changes)


def test_labels_up_to_the_last_class_pass_and_the_null_class_does_not():  # T16
    check_labels(np.arange(10), 10, "labels.gz")
    with pytest.raises(DataError, match=r"labels\.gz: label 10 \(image 3; .*10 is the null class"):
        check_labels(np.array([0, 9, 1, 10]), 10, "labels.gz")


@pytest.mark.parametrize(
    ("size", "patch", "factor", "nearest"),
    [(255, 2, 8, "240 or 256"), (257, 2, 8, "256 or 272"), (30, 4, 1, "28 or 32"), (3, 4, 1, "4$"), (15, 2, 8, "16$")],
)
def test_a_size_that_is_no_whole_number_of_patches_is_refused(size, patch, factor, nearest):  # T19
    with pytest.raises(ValueError, match=f"image_size {size} .*nearest valid: {nearest}"):
        check_image_size(size, patch, factor)


def test_valid_sizes_pass_and_senseless_ones_do_not():
    check_image_size(256, 2, 8)
    check_image_size(28, 4)
    with pytest.raises(ValueError, match="must be >= 1"):
        check_image_size(0, 4)
