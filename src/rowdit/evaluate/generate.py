"""Images from a model. Image i depends on (seed, i) alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rowdit import streams
from rowdit.data.batch import to_uint8
from rowdit.flow.guidance import guided_velocity
from rowdit.flow.samplers import SAMPLERS, time_grid

Progress = Callable[[int, int], None]  # (images done, images in all)


@torch.no_grad()
def generate(
    model: nn.Module,
    labels: Tensor,
    *,
    seed: int,
    image_shape: tuple[int, int, int],
    num_classes: int,
    first_index: int = 0,
    sampler: str = "euler",
    num_steps: int = 10,
    guidance: float = 1.0,
    batch_size: int = 250,
    progress: Progress | None = None,
) -> Tensor:
    """Sample one image for each label.

    The noise of image i is the stream (seed, "sample", first_index + i). So the image depends neither on how many are
    asked for, nor on `batch_size`, nor on which process makes it, but for the rounding of matrix products, whose order
    of summation may change with the batch: a pixel may differ by one grey level where it lies on the border.

    Args:
        model: (x_BCHW, t_B, y_B) -> velocity; sampled in eval mode, and put back to its modes afterwards.
        labels: (N,) int64 in 0..num_classes, where num_classes is the null class.
        seed: of the noise.
        image_shape: (C, H, W).
        num_classes: number of classes.
        first_index: number of the first image.
        sampler: a key of `rowdit.flow.samplers.SAMPLERS`.
        num_steps: steps of the sampler.
        guidance: scale of classifier-free guidance; 1 is none.
        batch_size: images at once.
        progress: called with (images done, images in all) after every batch.

    Returns:
        (N, C, H, W) uint8 on the CPU.

    Raises:
        ValueError: labels out of range, an unknown sampler, a bad size.
        FloatingPointError: an image isn't finite: the model has diverged.
    """
    _check(labels, num_classes, sampler, batch_size, first_index)
    device = next(model.parameters()).device
    images = torch.empty((len(labels), *image_shape), dtype=torch.uint8)
    grid = time_grid(num_steps)
    with _eval_mode(model):
        for start in range(0, len(labels), batch_size):
            batch_labels = labels[start : start + batch_size].to(device)
            stop = start + len(batch_labels)
            indices = torch.arange(first_index + start, first_index + stop)
            noise = streams.normal(seed, "sample", indices, image_shape).to(device)
            velocity = guided_velocity(model, batch_labels, guidance, num_classes)
            x = SAMPLERS[sampler](velocity, noise, grid)
            _check_finite(x, first_index + start)
            images[start:stop] = to_uint8(x).cpu()
            if progress is not None:
                progress(stop, len(labels))
    return images


def balanced_labels(num_images: int, num_classes: int) -> Tensor:
    """Return (num_images,) int64 0, 1, ..., num_classes - 1, 0, ...: every class equally often, up to one."""
    return torch.arange(num_images) % num_classes


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module has the mode it had (a frozen part may be in eval mode on purpose)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _check(labels: Tensor, num_classes: int, sampler: str, batch_size: int, first_index: int) -> None:
    if labels.ndim != 1 or labels.is_floating_point():
        raise ValueError(f"labels must be a vector of integers, got shape {tuple(labels.shape)} of {labels.dtype}")
    outside = labels[(labels < 0) | (labels > num_classes)]
    if len(outside):
        raise ValueError(f"labels must be in 0..{num_classes} ({num_classes} is the null class), got {int(outside[0])}")
    if sampler not in SAMPLERS:
        raise ValueError(f"there is no sampler {sampler!r}; there are {', '.join(SAMPLERS)}")
    if batch_size < 1 or first_index < 0:
        raise ValueError(
            f"batch_size must be at least 1 and first_index at least 0, got {batch_size} and {first_index}"
        )


def _check_finite(x: Tensor, first_index: int) -> None:
    bad = (~x.isfinite().flatten(1).all(dim=1)).nonzero()
    if len(bad):
        raise FloatingPointError(
            f"{len(bad)} of {len(x)} sampled images aren't finite (first: image {first_index + int(bad[0])}): "
            "the model has diverged; sample from an earlier checkpoint or train with a lower learning rate"
        )
