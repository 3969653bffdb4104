"""Half of a symmetric matrix, and back."""

from __future__ import annotations

import pytest
import torch

from rowdit.cost.live_bytes import LiveBytes
from rowmuon.packing import pack_, packed_columns, unpack_, unpack_bytes

SIZES = [*range(1, 10), 64, 65]


def symmetric(num: int, size: int) -> torch.Tensor:
    X = torch.randn(num, size, size, generator=torch.Generator().manual_seed(size))
    return X + X.mT


@pytest.mark.parametrize("size", SIZES)
def test_every_pair_is_kept_once_and_all_come_back(size: int) -> None:
    X = symmetric(3, size)
    packed = torch.full((3, size, packed_columns(size)), torch.nan)
    pack_(X, packed)
    assert [int(part.count_nonzero()) for part in packed] == [size * (size + 1) // 2] * 3
    assert torch.equal(packed[..., 0], X.diagonal(dim1=-2, dim2=-1))
    for at_once in (1, 2 * size**2, 1 << 20):
        whole = torch.full_like(X, torch.nan)
        unpack_(packed, whole, at_once)
        assert torch.equal(whole, X)


def test_into_any_strides_and_dtype() -> None:
    """As rows of several matrices are sent: row i of each, then row i + 1."""
    X = symmetric(2, 6)
    rows = torch.empty(6, 2, packed_columns(6), dtype=torch.bfloat16)
    pack_(X, rows.transpose(0, 1))
    whole = torch.empty(2, 6, 6, dtype=torch.bfloat16)
    unpack_(rows.transpose(0, 1), whole, 1)
    assert torch.equal(whole, X.bfloat16())


def test_what_is_not_finite_stays_in_its_matrix() -> None:
    X = symmetric(3, 7)
    X[1] = torch.nan
    packed = torch.empty(3, 7, packed_columns(7))
    pack_(X, packed)
    whole = torch.empty_like(X)
    unpack_(packed, whole, 1 << 20)
    assert torch.equal(whole[::2], X[::2]) and bool(whole[1].isnan().all())


def test_no_matrices() -> None:
    packed, whole = torch.empty(0, 4, packed_columns(4)), torch.empty(0, 4, 4)
    pack_(whole, packed)
    unpack_(packed, whole, 1)


@pytest.mark.parametrize("at_once", [1, 2 * 30 * 30, 1 << 20])
def test_it_takes_what_it_says(at_once: int) -> None:
    packed, whole = torch.zeros(5, 30, packed_columns(30)), torch.empty(5, 30, 30)
    with LiveBytes() as live:
        unpack_(packed, whole, at_once)
    assert live.peak == unpack_bytes(5, 30, torch.float32, at_once)
