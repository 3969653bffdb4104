from __future__ import annotations

import hashlib

import numpy as np
import pytest
import scipy.stats
import torch

from rowdit import streams

MASK = (1 << 64) - 1


def philox4x64(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64-10 in plain integers (Salmon et al., SC 2011, section 3.3 and table 2), written from the paper."""
    key = list(key)
    for _ in range(10):
        left, right = counter[0] * 0xD2E7470EE14C6C93, counter[2] * 0xCA5A826395121157
        counter = [(right >> 64) ^ counter[1] ^ key[0], right & MASK, (left >> 64) ^ counter[3] ^ key[1], left & MASK]
        key = [(key[0] + 0x9E3779B97F4A7C15) & MASK, (key[1] + 0xBB67AE8584CAA73B) & MASK]
    return counter


def expected_words(seed: int, purpose: str, index: int, num: int) -> list[int]:
    digest = hashlib.blake2b(f"rowdit.streams/1\0{seed}\0{purpose}".encode(), digest_size=16).digest()
    key = [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")]
    words: list[int] = []
    block = 0
    while len(words) < num:
        block += 1
        words += philox4x64([block, 0, index, 0], key)
    return words[:num]


# ---- the numbers themselves: a change here changes every run ever made


def test_uniform_is_the_documented_function_of_philox():
    for seed, purpose, index in [(0, "time", 0), (42, "noise", 7), (-3, "flip", 2**40 + 5)]:
        expected = [word >> 40 for word in expected_words(seed, purpose, index, 9)]
        got = streams.uniform(seed, purpose, [index], (9,))[0].double() * 2**24
        assert got.tolist() == expected


def test_normal_is_the_inverse_distribution_function_of_philox():
    words = np.array(expected_words(42, "noise", 123456789, 50), dtype=np.uint64)
    expected = scipy.stats.norm.ppf(((words >> np.uint64(12)).astype(np.float64) + 0.5) / 2**52)
    got = streams.normal(42, "noise", [123456789], (50,))[0].double().numpy()
    np.testing.assert_allclose(got, expected, rtol=2e-7)  # float32 rounding is 6e-8, libraries differ in the last bits


def test_golden_values():
    assert streams.uniform(42, "time", [0, 1, 123456789]).tolist() == [
        0.32452845573425293,
        0.016944050788879395,
        0.19500738382339478,
    ]
    expected = torch.tensor([-2.8182599544525146, -1.1215275526046753, 0.7210196852684021, -0.46332886815071106])
    torch.testing.assert_close(streams.normal(42, "noise", [0], (4,))[0], expected, rtol=2e-7, atol=0)
    assert streams.permutation(42, "order", 1, 10).tolist() == [1, 9, 6, 5, 8, 0, 2, 3, 4, 7]


# ---- independence of batch, order, shape and of everything else that draws


@pytest.mark.parametrize("draw", [streams.uniform, streams.normal])
def test_a_row_depends_on_its_own_index_alone(draw):
    whole = draw(5, "noise", range(20), (3, 4))
    one_by_one = torch.cat([draw(5, "noise", [i], (3, 4)) for i in range(20)])
    order = torch.tensor([7, 3, 19, 3, 0])
    assert torch.equal(whole, one_by_one)
    assert torch.equal(draw(5, "noise", order, (3, 4)), whole[order])
    assert torch.equal(
        torch.cat([draw(5, "noise", range(0, 9), (3, 4)), draw(5, "noise", range(9, 20), (3, 4))]), whole
    )


@pytest.mark.parametrize("draw", [streams.uniform, streams.normal])
def test_a_smaller_shape_gives_the_beginning_of_a_larger_one(draw):
    assert torch.equal(draw(5, "noise", [4, 9], (7,)), draw(5, "noise", [4, 9], (30,))[:, :7])
    assert torch.equal(draw(5, "noise", [4], (5, 6)).flatten(), draw(5, "noise", [4], (30,))[0])
    assert torch.equal(draw(5, "noise", [4, 9], ()), draw(5, "noise", [4, 9], (30,))[:, 0])


def test_the_internal_block_size_does_not_show(monkeypatch):
    whole = streams.normal(1, "noise", range(10), (6,))
    for block_words in (1, 13, 24):
        monkeypatch.setattr(streams, "_BLOCK_WORDS", block_words)
        assert torch.equal(streams.normal(1, "noise", range(10), (6,)), whole)


def test_global_generators_are_neither_read_nor_moved():
    torch.manual_seed(0)
    np.random.seed(0)
    first = streams.normal(1, "noise", [1], (4,)), streams.permutation(1, "order", 0, 9)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    torch.manual_seed(1)
    np.random.seed(1)
    again = streams.normal(1, "noise", [1], (4,)), streams.permutation(1, "order", 0, 9)
    assert torch.equal(first[0], again[0]) and np.array_equal(first[1], again[1])
    torch.manual_seed(0)
    np.random.seed(0)
    assert torch.equal(torch.get_rng_state(), torch_state) and np.array_equal(np.random.get_state()[1], numpy_state)


def test_two_ranks_with_neighbouring_seeds_share_no_numbers():  # T9: seed + rank as a seed collides
    seed41_rank1, seed42_rank0 = (streams.normal(s, "noise", [i], (64,)) for s, i in [(41, 1), (42, 0)])
    assert not np.isin(seed41_rank1.numpy(), seed42_rank0.numpy()).any()


def test_streams_do_not_collide():
    """All words of many streams differ: 64-bit words meet by chance with probability 1e-11 here."""
    ids = [(s, p, i) for s in (0, 1, 2, 41, 42, -1) for p in ("noise", "time", "flip", "") for i in (0, 1, 2, 2**32)]
    ids += [(1, "2x", 0), (12, "x", 0)]  # the same characters, cut elsewhere
    words = np.concatenate([streams._words(streams._key(s, p), np.array([i]), 100)[0] for s, p, i in ids])
    assert len(np.unique(words)) == len(ids) * 100


# ---- statistics


def test_uniform_is_uniform():
    numbers = streams.uniform(3, "time", range(1000), (100,)).double().flatten().numpy()
    assert numbers.min() >= 0 and numbers.max() < 1
    assert scipy.stats.kstest(numbers, "uniform").pvalue > 1e-3
    first_of_each = streams.uniform(3, "time", range(50_000)).numpy()
    assert scipy.stats.kstest(first_of_each, "uniform").pvalue > 1e-3


def test_uniform_never_reaches_one(monkeypatch):
    ends = np.array([[0, MASK]], dtype=np.uint64)
    monkeypatch.setattr(streams, "_words", lambda key, rows, num: ends)
    assert streams.uniform(0, "time", [0], (2,)).tolist() == [[0.0, 1 - 2.0**-24]]


def test_normal_is_normal_in_its_tails_too(monkeypatch):
    numbers = streams.normal(3, "noise", range(500), (400,)).double().flatten().numpy()
    assert abs(numbers.mean()) < 4 / len(numbers) ** 0.5
    assert abs(numbers.var() - 1) < 4 * (2 / len(numbers)) ** 0.5
    assert scipy.stats.kstest(numbers, "norm").pvalue > 1e-3
    ends = np.array([[0, MASK]], dtype=np.uint64)
    monkeypatch.setattr(streams, "_words", lambda key, rows, num: ends)
    low, high = streams.normal(0, "noise", [0], (2,))[0].tolist()
    assert low == -high and 8 < high < 8.3


def test_neighbouring_indices_are_uncorrelated():
    noise = streams.normal(3, "noise", range(400), (400,)).double()
    correlation = (noise[:-1] * noise[1:]).mean().item()
    assert abs(correlation) < 4 / (399 * 400) ** 0.5


def test_permutation():
    first, second = streams.permutation(7, "order", 0, 1000), streams.permutation(7, "order", 1, 1000)
    assert first.dtype == np.int64
    assert np.array_equal(np.sort(first), np.arange(1000)) and np.array_equal(np.sort(second), np.arange(1000))
    assert (first == second).mean() < 0.02 and (first == np.arange(1000)).mean() < 0.02
    assert streams.permutation(7, "order", 0, 0).tolist() == [] and streams.permutation(7, "order", 0, 1).tolist() == [
        0
    ]


def test_permutations_are_equally_likely():
    counts = np.zeros((4, 4))
    for epoch in range(4000):
        counts[np.arange(4), streams.permutation(0, "order", epoch, 4)] += 1
    chi2 = ((counts - 1000) ** 2 / 1000).sum()
    assert scipy.stats.chi2.sf(chi2, df=9) > 1e-3


# ---- inputs


@pytest.mark.parametrize(
    "indices",
    [torch.tensor([2, 0]), np.array([2, 0], dtype=np.int32), np.array([2, 0], dtype=np.uint64), [2, 0], (2, 0)],
)
def test_every_kind_of_index_gives_the_same(indices):
    assert torch.equal(streams.uniform(0, "time", indices), streams.uniform(0, "time", [2, 0]))


def test_no_indices_and_empty_shapes():
    assert streams.normal(0, "noise", [], (2, 3)).shape == (0, 2, 3)
    assert streams.normal(0, "noise", [1, 2], (0, 3)).shape == (2, 0, 3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: streams.uniform(0, "time", [3, -4]), ValueError, "-4"),
        (lambda: streams.uniform(0, "time", torch.zeros(2, 2, dtype=torch.int64)), ValueError, r"\(2, 2\)"),
        (lambda: streams.uniform(0, "time", [0.5]), TypeError, "float64"),
        (lambda: streams.uniform(0.5, "time", [0]), TypeError, "0.5"),
        (lambda: streams.uniform(True, "time", [0]), TypeError, "True"),
        (lambda: streams.permutation(0, "order", -1, 4), ValueError, "-1"),
        (lambda: streams.permutation(0, "order", 0, -2), ValueError, "-2"),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()
