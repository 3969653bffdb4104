"""Images from a model. Image i depends on (seed, i) alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rowdit import streams
from rowdit.data.batch import to_uint8
from rowdit.evaluate.ranks import Ranks
from rowdit.evaluate.score import Sampling
from rowdit.flow.guidance import guided_velocity
from rowdit.flow.samplers import SAMPLERS, time_grid

Progress = Callable[[int, int], None]  # (images done, images in all)


class Decoder(Protocol):
    """What turns latents into images, for models that were trained on latents; `rowdit.encode.Encoder` is one."""

    def decode(self, latents: Tensor) -> Tensor:
        """(B, c, h, w) float32 latents, scaled as the model was trained on, to (B, C, H, W) uint8 on the CPU."""
        ...

    def describe(self) -> dict[str, Any]:
        """Plain data: name, hash, scale, ..., and `spec`, where it was found."""
        ...


def describe_decoder(decoder: Decoder | None) -> dict[str, Any] | None:
    """What a fingerprint says of a decoder: all but where it lies."""
    if decoder is None:
        return None
    return {key: value for key, value in decoder.describe().items() if key != "spec"}


@torch.no_grad()
def images_at(
    model: nn.Module,
    indices: Tensor,
    labels: Tensor,
    sampling: Sampling,
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    decoder: Decoder | None = None,
) -> Tensor:
    """Sample the images of these numbers, as one batch.

    The noise of image i is the stream (seed, "sample", i). An image depends on what else is in the batch by the
    rounding of matrix products only, and at the same place of a batch of the same size not at all (on one machine, with
    deterministic kernels): whoever wants equal bits makes batches of one size that start at its multiples.

    Args:
        model: (x_BCHW, t_B, y_B) -> velocity, in the mode that it is to be sampled in.
        indices: (B,) int64 >= 0, the numbers of the images.
        labels: (B,) int64 in 0..num_classes, where num_classes is the null class; or (B, E) embeddings of captions.
        sampling: sampler, steps, guidance and seed. Its `first_index` isn't used here.
        image_shape: (C, H, W) of what the model makes: of the latents, where there is a decoder.
        num_classes: number of classes; 0 with captions.
        decoder: from latents to images.

    Returns:
        (B, C, H, W) uint8 on the CPU.

    Raises:
        ValueError: labels out of range, an unknown sampler, a bad setting.
        FloatingPointError: an image isn't finite: the model has diverged.
    """
    check_sampling(sampling)
    _check_labels(labels, num_classes)
    device = next(model.parameters()).device
    noise = streams.normal(sampling.seed, "sample", indices, image_shape).to(device)
    velocity = guided_velocity(
        model, labels.to(device), sampling.guidance, num_classes, interval=sampling.guidance_interval
    )
    with torch.autocast(device.type, torch.bfloat16, enabled=sampling.precision == "bfloat16"):
        x = SAMPLERS[sampling.sampler](velocity, noise, time_grid(sampling.num_steps, sampling.time_shift)).float()
    _check_finite(x, indices)
    return to_uint8(x).cpu() if decoder is None else decoder.decode(x)


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
    guidance_interval: tuple[float, float] | None = None,
    time_shift: float = 1.0,
    batch_size: int = 250,
    progress: Progress | None = None,
    decoder: Decoder | None = None,
    ranks: Ranks | None = None,
) -> Tensor:
    """Sample one image for each label.

    The noise of image i is the stream (seed, "sample", first_index + i). So the image depends neither on how many are
    asked for, nor on `batch_size`, nor on which process makes it, but for the rounding of matrix products, whose order
    of summation may change with the batch: a pixel may differ by one grey level where it lies on the border.

    Args:
        model: (x_BCHW, t_B, y_B) -> velocity; sampled in eval mode, and put back to its modes afterwards.
        labels: (N,) int64 in 0..num_classes, where num_classes is the null class; or (N, E) embeddings of captions.
        seed: of the noise.
        image_shape: (C, H, W); of the latents, where there is a decoder.
        num_classes: number of classes; 0 with captions.
        first_index: number of the first image.
        sampler: a key of `rowdit.flow.samplers.SAMPLERS`.
        num_steps: steps of the sampler.
        guidance: scale of classifier-free guidance; 1 is none.
        guidance_interval: the times (low, high) at which to guide; None guides at all.
        time_shift: of the sampler's time grid; 1 is the even grid.
        batch_size: images at once.
        progress: called with (images done, images in all) after every batch; on several ranks, of this rank's share.
        decoder: from latents to images.
        ranks: share the work among these processes, all of which must call this alike and all of which get all images.
            The model may be sharded over them: each calls it equally often. None works alone.

    Returns:
        (N, C, H, W) uint8 on the CPU.

    Raises:
        ValueError: labels out of range, an unknown sampler, a bad size.
        FloatingPointError: an image isn't finite: the model has diverged. On several ranks, on all of them.
    """
    _check(labels, num_classes, batch_size, first_index)
    sampling = Sampling(
        sampler, num_steps, guidance, seed, first_index, guidance_interval=guidance_interval, time_shift=time_shift
    )
    check_sampling(sampling)
    options: dict[str, Any] = {"image_shape": image_shape, "num_classes": num_classes, "decoder": decoder}
    pieces = torch.arange(len(labels)).split(batch_size)
    with eval_mode(model):
        if ranks is None or ranks.world_size == 1:
            batches = []
            for piece in pieces if len(labels) else ():
                batches.append(images_at(model, first_index + piece, labels[piece], sampling, **options))
                if progress is not None:
                    progress(int(piece[-1]) + 1, len(labels))
        else:
            batches = _in_lockstep(model, pieces, labels, sampling, options, ranks, progress)
    return torch.cat(batches) if batches else torch.empty((0, *image_shape), dtype=torch.uint8)


def _in_lockstep(
    model: nn.Module,
    pieces: tuple[Tensor, ...],
    labels: Tensor,
    sampling: Sampling,
    options: dict[str, Any],
    ranks: Ranks,
    progress: Progress | None,
) -> list[Tensor]:
    """Every rank makes every world_size-th batch, and makes equally many; then all are handed round."""
    own: list[Tensor] = []
    error: FloatingPointError | None = None
    for first in range(0, len(pieces), ranks.world_size):
        # A rank that has no batch left makes the last one again: the others wait for it in the model's collectives.
        piece = pieces[min(first + ranks.rank, len(pieces) - 1)]
        try:
            batch = images_at(model, sampling.first_index + piece, labels[piece], sampling, **options)
        except FloatingPointError as diverged:
            error, batch = diverged, torch.empty(0, dtype=torch.uint8)
        if first + ranks.rank < len(pieces):
            own.append(batch)
        if progress is not None:
            progress(sum(map(len, own)), len(labels))
    shares = ranks.gather((str(error) if error else "", own))
    for message, _ in shares:
        if message:
            raise FloatingPointError(message)
    return [shares[number % ranks.world_size][1][number // ranks.world_size] for number in range(len(pieces))]


def balanced_labels(num_images: int, num_classes: int) -> Tensor:
    """Return (num_images,) int64 0, 1, ..., num_classes - 1, 0, ...: every class equally often, up to one."""
    return torch.arange(num_images) % num_classes


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module has the mode it had (a frozen part may be in eval mode on purpose)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def check_sampling(sampling: Sampling) -> None:
    """Raise a ValueError unless there is such a sampler; its other settings are checked where they are used."""
    if sampling.sampler not in SAMPLERS:
        raise ValueError(f"there is no sampler {sampling.sampler!r}; there are {', '.join(SAMPLERS)}")
    if sampling.precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision is {sampling.precision!r}; it must be float32 or bfloat16")


def _check_labels(labels: Tensor, num_classes: int) -> None:
    if num_classes == 0 and labels.ndim == 2 and labels.is_floating_point():  # embeddings of captions
        return
    if labels.ndim != 1 or labels.is_floating_point():
        raise ValueError(f"labels must be a vector of integers, got shape {tuple(labels.shape)} of {labels.dtype}")
    outside = labels[(labels < 0) | (labels > num_classes)]
    if len(outside):
        raise ValueError(f"labels must be in 0..{num_classes} ({num_classes} is the null class), got {int(outside[0])}")


def _check(labels: Tensor, num_classes: int, batch_size: int, first_index: int) -> None:
    _check_labels(labels, num_classes)
    if batch_size < 1 or first_index < 0:
        raise ValueError(
            f"batch_size must be at least 1 and first_index at least 0, got {batch_size} and {first_index}"
        )


def _check_finite(x: Tensor, indices: Tensor) -> None:
    bad = (~x.isfinite().flatten(1).all(dim=1)).nonzero()
    if len(bad):
        raise FloatingPointError(
            f"{len(bad)} of {len(x)} sampled images aren't finite (first: image {int(indices[int(bad[0])])}): "
            "the model has diverged; sample from an earlier checkpoint or train with a lower learning rate"
        )
