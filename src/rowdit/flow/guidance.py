"""Classifier-free guidance: its training half (class dropout) and its sampling half (guided velocity).

Source: Ho and Salimans, arXiv:2207.12598, for velocities. A model with num_classes classes has one more row in its
class table, number num_classes, the null class: "no class given".
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rowdit.flow.path import VelocityModel


def drop_labels(y: Tensor, u: Tensor, probability: float, num_classes: int) -> Tensor:
    """Replace the class of an image by the null class where u < probability.

    Args:
        y: (B,) int64 classes; or (B, E) embeddings of captions, whose null is zeros (num_classes is 0 then).
        u: (B,) uniform in [0, 1), ``streams.uniform(seed, "class_dropout", positions)``.
        probability: in [0, 1]; 0 drops none, 1 all.
        num_classes: the number of the null class.

    Returns:
        Of y's shape and dtype, a new tensor.

    Raises:
        ValueError: a probability outside [0, 1], or shapes that differ.

    Example:
        >>> drop_labels(torch.tensor([3, 4]), torch.tensor([0.05, 0.5]), 0.1, num_classes=10).tolist()
        [10, 4]
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"class dropout probability is {probability}; it must lie in [0, 1]")
    if u.shape != y.shape[:1]:
        raise ValueError(f"u has shape {tuple(u.shape)} but the labels {tuple(y.shape)}; one number for each label")
    dropped = (u.to(y.device) < probability).view(-1, *(1 for _ in y.shape[1:]))
    return torch.where(dropped, num_classes, y)


def guided_velocity(
    model: VelocityModel,
    y: Tensor,
    scale: float,
    num_classes: int,
    interval: tuple[float, float] | None = None,
) -> Callable[[Tensor, Tensor], Tensor]:
    """v = v_null + scale (v_class - v_null), over all channels.

    Scale 1 is the class-conditional and scale 0 the unconditional velocity, either by one forward of B; any other scale
    by one forward of 2 B. Outside of the interval, where given, it is the class-conditional velocity, by one of B.

    Args:
        model: (x_BCHW, t_B, y_B) -> v_BCHW.
        y: (B,) int64 classes of the images that will be made.
        scale: >= 0.
        num_classes: the number of the null class.
        interval: (low, high), the times low <= t <= high at which to guide, within [0, 1] (0 is data, 1 noise); None
            guides at all of them. At high noise guidance costs variety, near the data it does nothing. (A host read of
            t at every call.)

    Returns:
        velocity(x_BCHW, t of shape ()) -> v_BCHW, what the samplers ask for.

    Raises:
        ValueError: a scale that is negative or not finite; an interval that isn't one.

    Source: the interval is from Kynkaanniemi et al., arXiv:2404.07724.
    """
    if not (math.isfinite(scale) and scale >= 0):
        raise ValueError(f"guidance scale is {scale}; it must be finite and >= 0 (1 is no guidance)")
    if interval is not None and not (len(interval) == 2 and 0 <= interval[0] < interval[1] <= 1):
        raise ValueError(f"guidance interval is {interval}; it must be two times (low, high) with 0 <= low < high <= 1")
    null = torch.full_like(y, num_classes)
    if scale == 1 or (scale == 0 and interval is None):
        label = y if scale == 1 else null
        return lambda x, t: model(x, t.expand(len(x)), label)
    both = torch.cat([y, null])

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        if interval is not None and not interval[0] <= float(t) <= interval[1]:
            return model(x, t.expand(len(x)), y)
        v = model(torch.cat([x, x]), t.expand(2 * len(x)), both)
        # Under autocast v comes in bfloat16, and the difference of two of them is mostly rounding.
        v_class, v_null = v.to(torch.promote_types(v.dtype, x.dtype)).chunk(2)
        return torch.lerp(v_null, v_class, scale)

    return velocity
