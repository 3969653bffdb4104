"""The FID's Inception written out as one straight line, in float64: what TensorFlow's graph of 2015 computes.

Written from the description of the network (Szegedy et al., arXiv:1512.00567, and the differences that the FID's graph
has), not from the code under test: every call names its parameters, its padding and its pool.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def conv(weights: dict[str, Tensor], name: str, x: Tensor, stride: int = 1, pad: tuple[int, int] = (0, 0)) -> Tensor:
    """Convolution, (x - mean) / sqrt(var + 0.001) * gamma + beta, max(x, 0)."""
    w = {key: weights[f"{name}.bn.{key}"].double()[:, None, None] for key in ("weight", "bias")}
    mean, var = (weights[f"{name}.bn.running_{key}"].double()[:, None, None] for key in ("mean", "var"))
    y = F.conv2d(F.pad(x, (pad[1], pad[1], pad[0], pad[0])), weights[f"{name}.conv.weight"].double(), stride=stride)
    return ((y - mean) / (var + 0.001).sqrt() * w["weight"] + w["bias"]).clamp(min=0)


def mean_of_what_is_there(x: Tensor) -> Tensor:
    """3 x 3 mean, stride 1, over the pixels inside the image."""
    ones = torch.ones_like(x)

    def window_sum(y: Tensor) -> Tensor:
        padded = F.pad(y, (1, 1, 1, 1))
        height, width = y.shape[-2:]
        return sum(padded[..., i : i + height, j : j + width] for i in range(3) for j in range(3))

    return window_sum(x) / window_sum(ones)


def largest_around(x: Tensor) -> Tensor:
    """3 x 3 maximum, stride 1."""
    padded = F.pad(x, (1, 1, 1, 1), value=-torch.inf)
    height, width = x.shape[-2:]
    return torch.stack([padded[..., i : i + height, j : j + width] for i in range(3) for j in range(3)]).amax(0)


def largest_of_every_second(x: Tensor) -> Tensor:
    """3 x 3 maximum, stride 2, no padding."""
    height, width = (x.shape[-2] - 3) // 2 + 1, (x.shape[-1] - 3) // 2 + 1
    shifted = [x[..., i : i + 2 * height - 1 : 2, j : j + 2 * width - 1 : 2] for i in range(3) for j in range(3)]
    return torch.stack(shifted).amax(0)


def block_5(w: dict[str, Tensor], n: str, x: Tensor) -> Tensor:
    a = conv(w, f"{n}.branch1x1", x)
    b = conv(w, f"{n}.branch5x5_2", conv(w, f"{n}.branch5x5_1", x), pad=(2, 2))
    c = conv(w, f"{n}.branch3x3dbl_2", conv(w, f"{n}.branch3x3dbl_1", x), pad=(1, 1))
    c = conv(w, f"{n}.branch3x3dbl_3", c, pad=(1, 1))
    d = conv(w, f"{n}.branch_pool", mean_of_what_is_there(x))
    return torch.cat([a, b, c, d], 1)


def block_6(w: dict[str, Tensor], n: str, x: Tensor) -> Tensor:
    a = conv(w, f"{n}.branch1x1", x)
    b = conv(w, f"{n}.branch7x7_1", x)
    b = conv(w, f"{n}.branch7x7_2", b, pad=(0, 3))
    b = conv(w, f"{n}.branch7x7_3", b, pad=(3, 0))
    c = conv(w, f"{n}.branch7x7dbl_1", x)
    c = conv(w, f"{n}.branch7x7dbl_2", c, pad=(3, 0))
    c = conv(w, f"{n}.branch7x7dbl_3", c, pad=(0, 3))
    c = conv(w, f"{n}.branch7x7dbl_4", c, pad=(3, 0))
    c = conv(w, f"{n}.branch7x7dbl_5", c, pad=(0, 3))
    d = conv(w, f"{n}.branch_pool", mean_of_what_is_there(x))
    return torch.cat([a, b, c, d], 1)


def block_7(w: dict[str, Tensor], n: str, x: Tensor, pooled: Tensor) -> Tensor:
    a = conv(w, f"{n}.branch1x1", x)
    b = conv(w, f"{n}.branch3x3_1", x)
    b1, b2 = conv(w, f"{n}.branch3x3_2a", b, pad=(0, 1)), conv(w, f"{n}.branch3x3_2b", b, pad=(1, 0))
    c = conv(w, f"{n}.branch3x3dbl_2", conv(w, f"{n}.branch3x3dbl_1", x), pad=(1, 1))
    c1, c2 = conv(w, f"{n}.branch3x3dbl_3a", c, pad=(0, 1)), conv(w, f"{n}.branch3x3dbl_3b", c, pad=(1, 0))
    d = conv(w, f"{n}.branch_pool", pooled)
    return torch.cat([a, b1, b2, c1, c2, d], 1)


def inception_features(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """(B, 3, H, W) in [-1, 1] to (B, 2048), float64."""
    x = conv(w, "Conv2d_1a_3x3", x.double(), stride=2)
    x = conv(w, "Conv2d_2a_3x3", x)
    x = conv(w, "Conv2d_2b_3x3", x, pad=(1, 1))
    x = largest_of_every_second(x)
    x = conv(w, "Conv2d_3b_1x1", x)
    x = conv(w, "Conv2d_4a_3x3", x)
    x = largest_of_every_second(x)
    for name in ("Mixed_5b", "Mixed_5c", "Mixed_5d"):
        x = block_5(w, name, x)
    a = conv(w, "Mixed_6a.branch3x3", x, stride=2)
    b = conv(w, "Mixed_6a.branch3x3dbl_2", conv(w, "Mixed_6a.branch3x3dbl_1", x), pad=(1, 1))
    x = torch.cat([a, conv(w, "Mixed_6a.branch3x3dbl_3", b, stride=2), largest_of_every_second(x)], 1)
    for name in ("Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"):
        x = block_6(w, name, x)
    a = conv(w, "Mixed_7a.branch3x3_2", conv(w, "Mixed_7a.branch3x3_1", x), stride=2)
    b = conv(w, "Mixed_7a.branch7x7x3_1", x)
    b = conv(w, "Mixed_7a.branch7x7x3_2", b, pad=(0, 3))
    b = conv(w, "Mixed_7a.branch7x7x3_3", b, pad=(3, 0))
    x = torch.cat([a, conv(w, "Mixed_7a.branch7x7x3_4", b, stride=2), largest_of_every_second(x)], 1)
    x = block_7(w, "Mixed_7b", x, mean_of_what_is_there(x))
    x = block_7(w, "Mixed_7c", x, largest_around(x))
    return x.mean((2, 3))
