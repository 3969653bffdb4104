"""A small convolutional classifier of the real images: do samples show the class that they were asked for?"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor, nn

from rowdit import streams
from rowdit.evaluate.score import canonical_json, check_equal, digest, write_atomically

if TYPE_CHECKING:
    from rowdit.data.batch import Dataset

FORMAT = "rowdit.classifier/1"

Progress = Callable[[int, int], None]  # (steps done, steps in all)


@dataclass(frozen=True)
class ClassifierConfig:
    """Width and training of the classifier.

    Args:
        width: channels of the first stage; the second has twice as many.
        num_epochs: passes over the training images.
        batch_size: images a step.
        lr: peak learning rate of AdamW, warmed up and annealed (one cycle).
        weight_decay: of AdamW.
        seed: initial weights and data order.
    """

    width: int = 24
    num_epochs: int = 4
    batch_size: int = 128
    lr: float = 5e-3
    weight_decay: float = 0.05
    seed: int = 0


class Classifier(nn.Module):
    """Logits from uint8 images: three 3 x 3 convolutions, the last two at half resolution, and a linear layer.

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
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(3),
            nn.Flatten(),
            nn.Linear(9 * 2 * width, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) uint8 to (N, num_classes) logits."""
        if images.dtype != torch.uint8 or tuple(images.shape[1:]) != self.image_shape:
            raise ValueError(
                f"the classifier takes uint8 images of shape {self.image_shape}, "
                f"got {images.dtype} of shape {tuple(images.shape[1:])}"
            )
        return self.layers(images.float() / 127.5 - 1)

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
    side. Beside it lies the fingerprint as JSON.

    Args:
        dataset: the training split.
        config: width and training.
        folder: where trained classifiers are kept; None keeps none.
        device: where to train, and where the result lies.
        progress: called with (steps done, steps in all).

    Returns:
        The classifier, in eval mode, frozen.
    """
    fingerprint = {
        "format": FORMAT,
        "dataset": dataset.fingerprint,
        "image_shape": list(dataset.image_shape),
        "num_classes": dataset.num_classes,
        "num_images": len(dataset),
        "config": asdict(config),
    }
    classifier = Classifier(dataset.image_shape, dataset.num_classes, config.width, fingerprint)
    path = None if folder is None else Path(folder) / f"classifier-{digest(fingerprint)[:16]}.safetensors"
    if path is not None and path.is_file():
        stored = json.loads(path.with_suffix(".json").read_text())
        check_equal(f"the classifier in {path} and the one asked for", stored, fingerprint)
        classifier.load_state_dict(load_file(path))
    else:
        _train(classifier, dataset, config, torch.device(device), progress)
        if path is not None:
            write_atomically(path.with_suffix(".json"), canonical_json(fingerprint).encode())
            write_atomically(path, save({name: t.cpu().contiguous() for name, t in classifier.state_dict().items()}))
    return classifier.to(device).eval().requires_grad_(False)


def _train(
    classifier: Classifier, dataset: Dataset, config: ClassifierConfig, device: torch.device, progress: Progress | None
) -> None:
    _initialize(classifier, config.seed)
    classifier.to(device).train()
    steps_per_epoch = math.ceil(len(dataset) / config.batch_size)
    num_steps = steps_per_epoch * config.num_epochs
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=config.lr, total_steps=num_steps)
    for step in range(num_steps):
        epoch, place = divmod(step, steps_per_epoch)
        if place == 0:
            order = streams.permutation(config.seed, "classifier_order", epoch, len(dataset))
        images, labels = dataset.fetch(order[place * config.batch_size : (place + 1) * config.batch_size])
        logits = classifier(torch.from_numpy(images).to(device))
        optimizer.zero_grad()
        F.cross_entropy(logits, torch.from_numpy(labels).to(device)).backward()
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(step + 1, num_steps)


@torch.no_grad()
def _initialize(classifier: Classifier, seed: int) -> None:
    """He initialisation from the seed's own stream: the global generator is neither read nor moved."""
    for index, (name, parameter) in enumerate(classifier.named_parameters()):
        if parameter.ndim > 1:
            fan_in = parameter[0].numel()
            noise = streams.normal(seed, "classifier_init", [index], tuple(parameter.shape))[0]
            parameter.copy_(noise * (2 / fan_in) ** 0.5)
        elif name.endswith("bias"):
            parameter.zero_()
