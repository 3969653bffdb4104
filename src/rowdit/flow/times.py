"""At which times to train: maps from uniform numbers to t in [0, 1], t = 0 data and t = 1 noise.

The uniform numbers come from :func:`rowdit.streams.uniform`, so these functions draw nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SMALLEST = 2.0**-25  # half the spacing of the uniforms of rowdit.streams: keeps Phi^-1(0) = -inf away


def uniform_time(u: Tensor) -> Tensor:
    """Every time is as likely: t = u.

    Args:
        u: any shape, uniform in [0, 1).

    Returns:
        Same shape, float32.
    """
    return u.float()


def logit_normal_time(u: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """t = sigmoid(mean + std * Phi^-1(u)): the middle of the path more often than its ends.

    Args:
        u: any shape, uniform in [0, 1); 0 and 1 themselves are moved inside by 2^-25.
        mean: of logit(t); above 0 leans to noise, below 0 to data.
        std: of logit(t), > 0; smaller is more concentrated.

    Returns:
        Same shape, float32.

    Raises:
        ValueError: a mean or std that isn't finite, or std <= 0.

    Source: Esser et al., arXiv:2403.03206, section 3.1 (rf/lognorm(m, s)).

    Example:
        >>> round(logit_normal_time(torch.tensor([0.5]), mean=0.0).item(), 6)
        0.5
    """
    if not math.isfinite(mean):
        raise ValueError(f"mean is {mean}; logit-normal times need a finite mean")
    if not (math.isfinite(std) and std > 0):
        raise ValueError(f"std is {std}; logit-normal times need a finite std > 0")
    normal = torch.special.ndtri(u.double().clamp(_SMALLEST, 1 - _SMALLEST))
    return torch.sigmoid(mean + std * normal).float()
