"""What a comparison measures at a checkpoint, with the same labels, noise and held-out images every time.

score_select, score_report    Frechet distance of two disjoint sets of samples: the first chooses the best step, the
                              second says how good it is
kid, accuracy                 kernel distance, and the share of images of the class that was asked for; second set
val_loss                      flow-matching loss of held-out images at fixed t and noise
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rowdit import streams
from rowdit.data.batch import Dataset, to_float
from rowdit.evaluate import (
    EfficientNetLite0Features,
    Floor,
    Sampling,
    Score,
    balanced_labels,
    class_accuracy,
    generate,
    load_or_compute_reference,
    real_floor,
    score_images,
    train_classifier,
)
from rowdit.evaluate.fingerprint import digest
from rowdit.evaluate.grid import write_grid
from rowdit.flow import flow_loss
from rowdit.train.config import EvaluateConfig
from rowdit.train.log import write_json

SCORE_NAME = "fd_effnet_lite0"
MEASURES = ("score_select", "score_report", "kid", "val_loss", "accuracy")
GOLDEN = (math.sqrt(5) - 1) / 2
SAMPLE_BATCH = 250


class Evaluator:
    """Measures a model; prepared once for a data set, used for every run.

    Args:
        training: the training split, for the real-against-real floor and the classifier.
        held_out: the reference split: what samples are compared with, and the images of the validation loss.
        config: how many samples, which sampler.
        ema_decay: goes into the fingerprint.
        cache: folder for what takes long to prepare (reference features, floor, classifier), keyed by what it is of.
        check_stop: called between batches; may raise to abandon the measurement.
        device: where the feature network runs. Samples are made where the model is.
    """

    def __init__(
        self,
        training: Dataset,
        held_out: Dataset,
        config: EvaluateConfig,
        *,
        ema_decay: float,
        cache: Path,
        check_stop: Callable[[], None] = lambda: None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.ema_decay, self.check_stop = config, ema_decay, check_stop
        self.num_classes = held_out.num_classes
        self.image_shape = held_out.image_shape
        self.features = EfficientNetLite0Features(device)

        def progress(done: int, total: int) -> None:
            check_stop()

        self.reference = load_or_compute_reference(cache, held_out, self.features, progress=progress)
        self.floor = self._load_or_measure_floor(training, cache)
        self.classifier = train_classifier(training, folder=cache, progress=progress)
        self.classifier_accuracy = self._accuracy_on(held_out)
        self.held_out_labels = _labels_of(held_out).sort().values
        num_val = min(config.num_val_images, len(held_out))
        images, labels = held_out.fetch(np.arange(num_val))
        self.val_images, self.val_labels = to_float(images), torch.from_numpy(labels)
        self.val_noise = streams.normal(config.seed, "validation_noise", range(num_val), self.image_shape)
        # The golden-ratio sequence covers [0, 1) evenly for every prefix, so few images suffice.
        self.val_times = (torch.arange(num_val, dtype=torch.float64) * GOLDEN % 1).float()

    def measure(self, model: nn.Module, grid: Path | None = None) -> dict[str, Any]:
        """One evaluation, JSON-able; NaN for all that is made of samples when a sample isn't finite.

        Args:
            model: in eval mode; nothing of it is changed.
            grid: where to write the sample grid as PNG.
        """
        measured: dict[str, Any] = dict.fromkeys(MEASURES, math.nan)
        measured["val_loss"] = self._validation_loss(model)
        num, num_steps = self.config.num_samples, self.config.num_steps
        labels = self._labels(num)
        try:
            select = self._samples(model, 0, labels, num_steps)
            report = self._samples(model, num, labels, num_steps)
        except FloatingPointError:
            return measured
        if grid is not None:
            write_grid(grid, select[: self.config.grid_images], self.grid_columns)
        self.check_stop()
        measured["score_select"] = self._score(select, 0)[0].value
        self.check_stop()
        frechet, kernel = self._score(report, num)
        measured |= {
            "score_report": frechet.value,
            "kid": kernel.value,
            **{key: value for key, value in frechet.to_json().items() if key in ("fingerprint", "caution")},
        }
        measured["accuracy"] = class_accuracy(self.classifier, report, labels)
        return measured

    def _labels(self, num: int) -> Tensor:
        """Labels of samples, with the held-out images' frequencies in every prefix: else the distance would measure
        how unequal the classes are. Where they are equal, the classes in turn."""
        counts = torch.bincount(self.held_out_labels, minlength=self.num_classes)
        if bool((counts == counts[0]).all()):
            return balanced_labels(num, self.num_classes)
        places = torch.arange(num, dtype=torch.float64) * GOLDEN % 1
        return self.held_out_labels[(places * len(self.held_out_labels)).long()]

    def rehearse(self, model: nn.Module) -> None:
        """A little of everything with an untrained model, so that what can't work fails before hours of training.

        Raises:
            ValueError, RuntimeError: what sampling or scoring would raise later.
        """
        labels = balanced_labels(min(SAMPLE_BATCH, self.config.num_samples), self.num_classes)
        self.features(self._samples(model, 0, labels, num_steps=1))

    @property
    def grid_columns(self) -> int:
        """One column a class, as long as that fits a page."""
        return self.num_classes if self.num_classes <= 12 else 10

    def describe(self) -> dict[str, Any]:
        """What the scores stand on: the floors of real images, the classifier's own accuracy."""
        return {
            "floor": self.floor.frechet_mean,
            "kid_floor": self.floor.kernel_mean,
            "floor_details": self.floor.to_json(),
            "classifier_accuracy_on_real": self.classifier_accuracy,
            "grid_columns": self.grid_columns,
            "num_val_images": len(self.val_images),
        }

    def _samples(self, model: nn.Module, first_index: int, labels: Tensor, num_steps: int) -> Tensor:
        def progress(done: int, total: int) -> None:
            self.check_stop()

        return generate(
            model,
            labels,
            seed=self.config.seed,
            first_index=first_index,
            image_shape=self.image_shape,
            num_classes=self.num_classes,
            sampler=self.config.sampler,
            num_steps=num_steps,
            guidance=self.config.guidance,
            guidance_interval=self.config.guidance_interval,
            time_shift=self.config.time_shift,
            batch_size=SAMPLE_BATCH,
            progress=progress,
        )

    def _score(self, images: Tensor, first_index: int) -> tuple[Score, Score]:
        c = self.config
        sampling = Sampling(
            c.sampler,
            c.num_steps,
            c.guidance,
            c.seed,
            first_index,
            self.ema_decay,
            guidance_interval=c.guidance_interval,
            time_shift=c.time_shift,
        )
        return score_images(images, self.reference, self.features, floor=self.floor, sampling=sampling)

    @torch.no_grad()
    def _validation_loss(self, model: nn.Module) -> float:
        total, device = 0.0, next(model.parameters()).device
        inputs = (self.val_images, self.val_labels, self.val_noise, self.val_times)
        for piece in torch.arange(len(self.val_images)).split(SAMPLE_BATCH):
            x, y, noise, t = (v[piece].to(device) for v in inputs)
            total += float(flow_loss(model, x, y, noise, t).double().sum())
            self.check_stop()
        return total / len(self.val_images)

    def _accuracy_on(self, dataset: Dataset) -> float:
        images, labels = dataset.fetch(np.arange(min(len(dataset), 2000)))
        return class_accuracy(self.classifier, torch.from_numpy(images), torch.from_numpy(labels))

    def _load_or_measure_floor(self, training: Dataset, cache: Path) -> Floor:
        key = {"reference": self.reference.hash, "source": training.fingerprint, "num_images": self.config.num_samples}
        path = cache / f"floor-{digest(key)[:16]}.json"
        if path.is_file():
            saved = json.loads(path.read_text(encoding="utf-8"))
            return Floor(saved["num_images"], tuple(saved["frechet"]), tuple(saved["kernel"]), saved["source"])
        floor = real_floor(self.reference, training, self.features, self.config.num_samples, max_draws=2)
        write_json(path, floor.to_json())
        return floor


def _labels_of(dataset: Dataset) -> Tensor:
    """(N,) int64: all labels, without decoding an image where the data set has them at hand."""
    labels = getattr(dataset, "labels", None)
    if labels is None:
        _, labels = dataset.fetch(np.arange(len(dataset)))
    return torch.from_numpy(np.asarray(labels, np.int64))
