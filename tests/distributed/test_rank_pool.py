"""The pool of ranks that all other distributed tests stand on: it must never hang and never blame the wrong case."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from ranks.pool import RankError, RankPool


def total_of_ranks() -> float:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def raises_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        raise ValueError(f"planted on {bad_rank}")
    dist.barrier()


def dies_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        os._exit(7)
    dist.barrier()


def hangs_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        time.sleep(60)


@pytest.fixture
def pool():
    pool = RankPool(2)
    yield pool
    pool.close()


def test_results_come_back_by_rank(pool):
    assert pool.run(total_of_ranks) == [1.0, 1.0]
    assert pool.run(dist_rank) == [0, 1]
    assert pool.num_starts == 1


def dist_rank() -> int:
    return dist.get_rank()


def test_a_fault_names_its_rank_and_the_next_case_is_clean(pool):
    with pytest.raises(RankError, match=r"(?s)rank 1:.*raises_on.*ValueError: planted on 1"):
        pool.run(raises_on, 1)
    assert pool.run(total_of_ranks) == [1.0, 1.0]
    with pytest.raises(RankError, match=r"(?s)rank 0:\nthe process ended with exit code 7"):
        pool.run(dies_on, 0)
    with pytest.raises(RankError, match=r"(?s)fine: rank 0\n-- rank 1 was not done after 1 s, here:.*hangs_on"):
        pool.run(hangs_on, 1, timeout_s=1.0)
    assert pool.run(total_of_ranks) == [1.0, 1.0]
    assert pool.num_starts == 4
