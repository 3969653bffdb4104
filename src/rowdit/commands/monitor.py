"""What `rowdit train` measures while it trains: a little, often, by all ranks together.

val_loss           flow-matching loss of held-out images at fixed t and noise, of the averaged weights
val_loss_by_t      the same by the quarter of [0, 1] that t lies in: {"0.00-0.25": ...}
score_report, kid  distances of `evaluate.num_samples` samples from the held-out images, with their fingerprint. A model
                   of latents is compared with held-out latents, decoded as its samples are (`rowdit eval` compares it
                   with real images)
caution            why the distance is to be distrusted, where it is: too few images for its features
grid               the sample grid, a PNG in the run's folder
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rowdit import streams
from rowdit.data.batch import Dataset, model_input
from rowdit.flow import flow_loss
from rowdit.train.config import RunConfig
from rowdit.train.world import World

if TYPE_CHECKING:
    from rowdit.evaluate import EfficientNetLite0Features, Reference
    from rowdit.evaluate.generate import Decoder

GOLDEN = (math.sqrt(5) - 1) / 2
NUM_BINS = 4
BATCH = 64


class Monitor:
    """Measures the model of a run; all ranks call it alike.

    Args:
        config: of the run.
        held_out: images that aren't trained on.
        run: folder of the run; grids go into `run/samples`, what is prepared once into `run/evaluation`.
        world: the ranks.
        decoder: from latents to images; None for pixels.
        check_stop: called between batches; may raise to abandon the measurement, on all ranks alike.
    """

    def __init__(
        self,
        config: RunConfig,
        held_out: Dataset,
        run: Path,
        world: World,
        *,
        decoder: Decoder | None = None,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.run, self.world, self.decoder = config, run, world, decoder
        self.held_out, self.check_stop = held_out, check_stop
        self.makes_pixels = not config.data.source.startswith("latents:")
        self._reference: Reference | None = None
        num = min(config.evaluate.num_val_images, len(held_out))
        self._positions = torch.arange(num)

    def __call__(self, model: nn.Module, step: int) -> dict[str, Any]:
        measured = self._validation(model)
        num_classes = self.config.model.num_classes
        sampled = self.makes_pixels or self.decoder is not None
        if not sampled:
            return measured
        num_grid = self.config.evaluate.grid_images
        num = max(num_grid, self.config.evaluate.num_samples)
        labels = torch.arange(num) % num_classes
        try:
            images = self._generate(model, labels)
        except FloatingPointError:
            return measured | {"score_report": math.nan, "kid": math.nan}
        if self.world.is_main:
            grid = Path("samples") / f"step_{step:07d}.png"
            self._write_grid(self.run / grid, images[:num_grid], num_classes)
            measured["grid"] = grid.as_posix()
            measured |= self._score(images[: self.config.evaluate.num_samples])
        self.world.barrier()
        return measured

    @torch.no_grad()
    def _validation(self, model: nn.Module) -> dict[str, Any]:
        """Each rank measures every size-th image; a rank that has none left repeats its last one for the others."""
        own = self._positions[self.world.rank :: self.world.size]
        num_batches = math.ceil(math.ceil(len(self._positions) / self.world.size) / BATCH)
        sums = torch.zeros(2, NUM_BINS, dtype=torch.float64)
        for i in range(num_batches):
            positions = own[i * BATCH : (i + 1) * BATCH]
            counted = len(positions) > 0
            losses, times = self._losses(model, positions if counted else self._positions[:1])
            if counted:
                bins = (times * NUM_BINS).long().clamp(max=NUM_BINS - 1)
                sums[0].index_add_(0, bins, losses.double())
                sums[1].index_add_(0, bins, torch.ones_like(losses, dtype=torch.float64))
            self.check_stop()
        totals = self.world.total(sums.to(self.world.device)).cpu()
        by_bin = (totals[0] / totals[1]).tolist()
        names = [f"{i / NUM_BINS:.2f}-{(i + 1) / NUM_BINS:.2f}" for i in range(NUM_BINS)]
        return {
            "val_loss": float(totals[0].sum() / totals[1].sum()),
            "val_loss_by_t": dict(zip(names, by_bin, strict=True)),
        }

    def _losses(self, model: nn.Module, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and times of held-out images; noise and time of image i depend on (evaluate.seed, i) alone."""
        images, labels = self.held_out.fetch(positions.numpy())
        x = model_input(np.asarray(images))
        noise = streams.normal(self.config.evaluate.seed, "validation_noise", positions, tuple(x.shape[1:]))
        # The golden-ratio sequence covers [0, 1) evenly for every prefix, so few images suffice.
        times = (positions.double() * GOLDEN % 1).float()
        inputs = (v.to(self.world.device) for v in (x, torch.from_numpy(labels), noise, times))
        return flow_loss(model, *inputs).cpu(), times

    def _generate(self, model: nn.Module, labels: Tensor) -> Tensor:
        from rowdit.evaluate import generate
        from rowdit.evaluate.ranks import Ranks

        evaluate, shape = self.config.evaluate, self.config.model
        return generate(
            model,
            labels,
            seed=evaluate.seed,
            image_shape=(shape.in_channels, shape.image_size, shape.image_size),
            num_classes=shape.num_classes,
            sampler=evaluate.sampler,
            num_steps=evaluate.num_steps,
            guidance=evaluate.guidance,
            guidance_interval=evaluate.guidance_interval,
            time_shift=evaluate.time_shift,
            batch_size=BATCH,
            progress=lambda done, total: self.check_stop(),
            decoder=self.decoder,
            ranks=Ranks(self.world.rank, self.world.size, self.world.host_group),
        )

    def _write_grid(self, path: Path, images: Tensor, num_classes: int) -> None:
        from rowdit.evaluate.grid import write_grid

        write_grid(path, images, num_classes if num_classes <= 12 else 10)

    def _score(self, images: Tensor) -> dict[str, Any]:
        """Distances of the samples; the main rank alone, the others wait."""
        from rowdit.evaluate import EfficientNetLite0Features, Sampling, score_images

        features = EfficientNetLite0Features(self.world.device)
        if self._reference is None:
            self._reference = self._open_reference(features)
        e = self.config.evaluate
        decay, interval = self.config.train.ema_decay, e.guidance_interval
        sampling = Sampling(e.sampler, e.num_steps, e.guidance, e.seed, 0, decay, interval, e.time_shift)
        frechet, kernel = score_images(images, self._reference, features, floor=None, sampling=sampling)
        return {
            "score_report": frechet.value,
            "kid": kernel.value,
            **{key: value for key, value in frechet.to_json().items() if key in ("fingerprint", "caution")},
        }

    def _open_reference(self, features: EfficientNetLite0Features) -> Reference:
        """Of the held-out images; of latents, which are dear to decode, no more than are measured anyway."""
        from rowdit.evaluate import load_or_compute_reference
        from rowdit.evaluate.decoded import DecodedDataset

        held_out, num = self.held_out, len(self.held_out)
        if self.decoder is not None:
            held_out = DecodedDataset(self.held_out, self.decoder, BATCH)
            num = min(num, max(self.config.evaluate.num_val_images, self.config.evaluate.num_samples))
        return load_or_compute_reference(
            self.run / "evaluation", held_out, features, num, progress=lambda done, total: self.check_stop()
        )
