"""A small convolutional classifier of the real images: do samples show the class that they were asked for?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rowdit import streams
from rowdit.data.batch import to_float
from rowdit.evaluate.fingerprint import check_same, digest, load_tensors, save_tensors

if TYPE_CHECKING:
    from rowdit.data.batch import Dataset

FORMAT = "rowdit.classifier/1"  # changes with the network, so that a stored one never loads into another
POOLED_SIZE = 3

Progress = Callable[[int, int], None]  # (steps done, steps in all)


@dataclass(frozen=True)
class ClassifierConfig:
    """Width and training of the classifier.

    Args:
        width: channels of the first convolution; the second has twice, the third four times as many.
        num_epochs: passes over the training images.
        batch_size: images a step.
        lr: peak learning rate of AdamW, warmed up and annealed (one cycle).
        weight_decay: of AdamW.
        seed: initial weights and data order.
    """

    width: int = 32
    num_epochs: int = 4
    batch_size: int = 128
    lr: float = 1e-2
    weight_decay: float = 0.05
    seed: int = 0


class Classifier(nn.Module):
    """Logits from uint8 images: three convolutions, at 1/2, 1/2 and 1/4 of the resolution, and a linear layer.

    Args:
        image_shape: (C, H, W), H and W at least 4.
        num_classes: number of classes.
        width: channels of the first convolution.
        fingerprint: of the training data and settings, plain data.
    """

    def __init__(
        self, image_shape: tuple[int, int, int], num_classes: int, width: int, fingerprint: Mapping[str, Any]
    ) -> None:
        super().__init__()
        channels, height, width_pixels = image_shape
        if min(height, width_pixels) < 4:
            raise ValueError(f"the classifier needs images of at least 4 x 4 pixels, got {height} x {width_pixels}")
        self.image_shape = tuple(image_shape)
        self.num_classes = num_classes
        self.fingerprint = dict(fingerprint)
        self.layers = nn.Sequential(
            *_conv_norm_relu(channels, width, kernel_size=5, stride=2),
            *_conv_norm_relu(width, 2 * width, kernel_size=3),
            nn.MaxPool2d(2),
            *_conv_norm_relu(2 * width, 4 * width, kernel_size=3),
            nn.AdaptiveAvgPool2d(POOLED_SIZE),
            nn.Flatten(),
            nn.Linear(POOLED_SIZE**2 * 4 * width, num_classes),
        )
        # On the CPU the channels-last convolutions take 0.7 of the time.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) uint8 to (N, num_classes) logits."""
        if images.dtype != torch.uint8 or tuple(images.shape[1:]) != self.image_shape:
            raise ValueError(
                f"the classifier takes uint8 images of shape {self.image_shape}, "
                f"got {images.dtype} of shape {tuple(images.shape[1:])}"
            )
        return self.layers(to_float(images))

    @torch.no_grad()
    def predict(self, images: Tensor, batch_size: int = 500) -> Tensor:
        """Return (N,) int64: the most likely class of each image, on the CPU."""
        device = next(self.parameters()).device
        self.eval()
        parts = [
            self(images[start : start + batch_size].to(device)).argmax(dim=1)
            for start in range(0, len(images), batch_size)
        ]
        return torch.cat(parts).cpu() if parts else torch.empty(0, dtype=torch.int64)


def _conv_norm_relu(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False)
    return conv, nn.BatchNorm2d(out_channels), nn.ReLU()


def class_accuracy(classifier: Classifier, images: Tensor, labels: Tensor) -> float:
    """Return the share of images, in [0, 1], in which the classifier sees the class that was asked for.

    Real images don't reach 1: give the classifier's accuracy on the reference split beside it.

    Raises:
        ValueError: no images, or as many labels as images are not given.
    """
    if len(images) != len(labels) or len(images) == 0:
        raise ValueError(f"as many labels as images are needed, at least one, got {len(labels)} and {len(images)}")
    return float((classifier.predict(images) == labels.cpu()).double().mean())


def train_classifier(
    dataset: Dataset,
    *,
    config: ClassifierConfig = ClassifierConfig(),  # noqa: B008 (frozen)
    folder: Path | str | None = None,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> Classifier:
    """Train on a dataset's images, or take the trained one from `folder` where it is there.

    The file's name holds the hash of the fingerprint (dataset, image shape, classes, settings), so several live side by
    side; its header holds the fingerprint itself.

    Args:
        dataset: the training split.
        config: width and training.
        folder: where trained classifiers are kept; None keeps none.
        device: where to train, and where the result lies.
        progress: called with (steps done, steps in all).

    Returns:
        The classifier, in eval mode, frozen.

    Raises:
        ValueError: fewer than two images, images below 4 x 4 pixels, or a stored classifier that can't be used.
    """
    if len(dataset) < 2:
        raise ValueError(f"a classifier needs at least 2 training images, the dataset has {len(dataset)}")
    fingerprint = {
        "format": FORMAT,
        "dataset": dataset.fingerprint,
        "image_shape": list(dataset.image_shape),
        "num_classes": dataset.num_classes,
        "num_images": len(dataset),
        "config": asdict(config),
    }
    with torch.random.fork_rng(devices=[]):  # torch's layers draw their first weights from the global generator
        classifier = Classifier(dataset.image_shape, dataset.num_classes, config.width, fingerprint)
    path = None if folder is None else Path(folder) / f"classifier-{digest(fingerprint)[:16]}.safetensors"
    if path is not None and path.is_file():
        tensors, stored = load_tensors(path, FORMAT)
        check_same(f"the classifier in {path}", stored, "the one asked for", fingerprint)
        classifier.load_state_dict(tensors)
    else:
        _train(classifier, dataset, config, torch.device(device), progress)
        if path is not None:
            save_tensors(path, classifier.state_dict(), FORMAT, fingerprint)
    return classifier.to(device).eval().requires_grad_(False)


def _train(
    classifier: Classifier, dataset: Dataset, config: ClassifierConfig, device: torch.device, progress: Progress | None
) -> None:
    _initialize(classifier, config.seed)
    classifier.to(device).train()
    batches_per_epoch = max(1, round(len(dataset) / config.batch_size))
    num_steps = batches_per_epoch * config.num_epochs
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=config.lr, total_steps=num_steps)
    step = 0
    for epoch in range(config.num_epochs):
        order = streams.permutation(config.seed, "classifier_order", epoch, len(dataset))
        # Parts of nearly equal size: a last batch of one image would stop the batch normalisation.
        for indices in np.array_split(order, batches_per_epoch):
            images, labels = dataset.fetch(indices)
            logits = classifier(torch.from_numpy(images).to(device))
            optimizer.zero_grad()
            F.cross_entropy(logits, torch.from_numpy(labels).to(device)).backward()
            optimizer.step()
            schedule.step()
            step += 1
            if progress is not None:
                progress(step, num_steps)


@torch.no_grad()
def _initialize(classifier: Classifier, seed: int) -> None:
    """He initialisation, from the seed's own stream."""
    for index, (name, parameter) in enumerate(classifier.named_parameters()):
        if parameter.ndim > 1:
            fan_in = parameter[0].numel()
            noise = streams.normal(seed, "classifier_init", [index], tuple(parameter.shape))[0]
            parameter.copy_(noise * (2 / fan_in) ** 0.5)
        elif name.endswith("bias"):
            parameter.zero_()
