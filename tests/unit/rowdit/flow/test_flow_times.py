from __future__ import annotations

import math

import pytest
import scipy.stats
import torch

from rowdit.flow import logit_normal_time, uniform_time
from rowdit.streams import uniform

U = uniform(0, "time", range(20_000))


def test_uniform_time_is_u():
    assert torch.equal(uniform_time(U), U) and uniform_time(U.double()).dtype == torch.float32


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (-0.8, 0.5), (1.0, 2.0)])
def test_logit_of_time_is_normal(mean, std):
    t = logit_normal_time(U, mean, std)
    assert t.dtype == torch.float32 and t.min() > 0 and t.max() < 1
    logit = torch.logit(t.double()).numpy()
    assert scipy.stats.kstest(logit, "norm", args=(mean, std)).pvalue > 1e-3


def test_logit_normal_is_increasing_in_u_and_symmetric():
    u = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
    t = logit_normal_time(u)
    assert (t.diff() > 0).all() and t[2] == 0.5
    torch.testing.assert_close(t + t.flip(0), torch.ones(5))


def test_the_ends_stay_finite_and_inside():
    t = logit_normal_time(torch.tensor([0.0, 1 - 2.0**-24, 1.0]))
    assert t.isfinite().all() and t.min() > 0 and t.max() < 1 and t[0] < 0.01 and t[1] > 0.99
    t = logit_normal_time(torch.tensor([0.0, 1.0]), std=1000.0)
    assert t.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.0), (0.0, -1.0), (0.0, math.nan), (math.inf, 1.0)])
def test_bad_parameters(mean, std):
    with pytest.raises(ValueError, match="std is|mean is"):
        logit_normal_time(U, mean, std)
