"""Labels that fit a model's class table."""

from __future__ import annotations

import torch
from torch import Tensor


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Raise unless every label is one of 0 .. num_classes - 1. Reads from the device: call it once, at the start.

    Raises:
        ValueError: a label outside the range, or labels that aren't integers.

    Example:
        >>> check_labels(torch.tensor([0, 9]), num_classes=10)
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels are {labels.dtype}; classes must be integers")
    if labels.numel() == 0:
        return
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if len(outside):
        raise ValueError(
            f"label {outside[0].item()} is out of range ({len(outside)} of {labels.numel()} labels are): the model has "
            f"num_classes={num_classes}, so labels run from 0 to {num_classes - 1}. {num_classes} itself is the null "
            "class, which class dropout and guidance set. Raise num_classes, or mend the labels."
        )
