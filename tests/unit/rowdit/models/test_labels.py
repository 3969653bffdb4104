from __future__ import annotations

import pytest
import torch

from rowdit.models import check_labels


def test_labels_in_range_pass():
    check_labels(torch.tensor([0, 9, 3]), num_classes=10)
    check_labels(torch.tensor([], dtype=torch.int64), num_classes=10)
    check_labels(torch.tensor([0], dtype=torch.uint8), num_classes=1)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0, 10], r"label 10 .*1 of 2.*num_classes=10.*0 to 9.*null class"),
        ([3, -1, 12], r"label -1 .*2 of 3"),
    ],
)
def test_labels_out_of_range_are_named(labels, words):
    with pytest.raises(ValueError, match=words):
        check_labels(torch.tensor(labels), num_classes=10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_labels_that_are_no_integers(dtype):
    with pytest.raises(ValueError, match=str(dtype)):
        check_labels(torch.zeros(2, dtype=dtype), num_classes=10)
