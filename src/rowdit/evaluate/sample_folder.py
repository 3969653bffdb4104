"""A folder of samples that grows image by image, on any number of processes, and is never wrong when they are killed.

    OUT/sampling.json           what the images are: the model and its hash, the sampler, the labels; written first
    OUT/images/00000000.png     image 0: it is there whole, or not at all
    OUT/grid.png, samples.npz   made of the images at the end

Batches are numbered from image 0 on and always full, so image i has the same place in a batch of the same size however
many images are asked for, whichever rank makes it and wherever a kill left a gap: its bytes are the same each time, on
one machine and with deterministic kernels. With another batch size, or on another machine, a pixel may differ by a grey
level, for matrix products then sum in another order.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from rowdit import streams
from rowdit.evaluate.fingerprint import check_same, write_whole
from rowdit.evaluate.generate import Decoder, Progress, check_sampling, describe_decoder, eval_mode, images_at
from rowdit.evaluate.ranks import Ranks
from rowdit.evaluate.score import Sampling
from rowdit.flow import guided_velocity, time_grid

FORMAT = "rowdit.samples/1"
_PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"  # the last chunk of every PNG

LabelRule = str
"""Which class image i has: "balanced" (i modulo the number of classes), "random" (from the stream (seed,
"sample_class", i)), "null" (none), or classes to take in turns, such as "3" or "0,5,7"."""


class SampleFolderError(ValueError):
    """The folder can't be used; the message says why and what can be done."""


def labels_at(rule: LabelRule, indices: Tensor, num_classes: int, seed: int) -> Tensor:
    """(B,) int64: the classes of these images, a function of (rule, seed, i) alone.

    Raises:
        ValueError: a rule that is none, or a class outside 0..num_classes - 1.

    Example:
        >>> labels_at("balanced", torch.arange(4), 3, seed=0).tolist()
        [0, 1, 2, 0]
        >>> labels_at("5,7", torch.arange(3), 10, seed=0).tolist()
        [5, 7, 5]
    """
    if rule == "balanced":
        return indices % num_classes
    if rule == "random":
        return (streams.uniform(seed, "sample_class", indices).double() * num_classes).long()
    if rule == "null":
        return torch.full_like(indices, num_classes)
    try:
        classes = torch.tensor([int(number) for number in rule.split(",")])
    except ValueError:
        raise ValueError(
            f"labels {rule!r}: must be balanced, random, null, or numbers of classes such as 0,5,7"
        ) from None
    outside = classes[(classes < 0) | (classes >= num_classes)]
    if len(outside):
        raise ValueError(f"labels {rule!r}: there is no class {int(outside[0])}; the model has 0..{num_classes - 1}")
    return classes[indices % len(classes)]


@dataclass(frozen=True)
class SampleJob:
    """What images are to be made of; two jobs with the same `fingerprint` make the same images.

    Args:
        model: (x_BCHW, t_B, y_B) -> velocity, on its device.
        model_fingerprint: plain data that names the weights, with their hash.
        sampling: sampler, steps, guidance, seed. `first_index` must be 0.
        latent_shape: (C, H, W) of what the model makes: of the images, unless there is a decoder.
        num_classes: number of classes.
        labels: the rule for the classes.
        batch_size: images in every batch.
        decoder: from latents to images.
    """

    model: nn.Module
    model_fingerprint: Mapping[str, Any]
    sampling: Sampling
    latent_shape: tuple[int, int, int]
    num_classes: int
    labels: LabelRule = "balanced"
    batch_size: int = 64
    decoder: Decoder | None = None

    def fingerprint(self) -> dict[str, Any]:
        sampling = {key: value for key, value in self.sampling.fingerprint().items() if key != "first_index"}
        return {
            "model": dict(self.model_fingerprint),
            "sampling": sampling | {"labels": self.labels, "num_classes": self.num_classes},
            "batch_size": self.batch_size,
            "latent_shape": list(self.latent_shape),
            "decoder": describe_decoder(self.decoder),
        }

    def check(self) -> None:
        """Raise a ValueError that names the first setting that can't be, before anything is made or written."""
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")
        check_sampling(self.sampling)
        one = torch.zeros(1, dtype=torch.int64)
        labels_at(self.labels, one, self.num_classes, self.sampling.seed)
        time_grid(self.sampling.num_steps, self.sampling.time_shift)
        guided_velocity(self.model, one, self.sampling.guidance, self.num_classes, self.sampling.guidance_interval)
        if self.decoder is None:
            to_picture(torch.empty(self.latent_shape, dtype=torch.uint8))

    def batch(self, number: int) -> Tensor:
        """Images number * batch_size and on: (batch_size, C, H, W) uint8."""
        indices = torch.arange(number * self.batch_size, (number + 1) * self.batch_size)
        labels = labels_at(self.labels, indices, self.num_classes, self.sampling.seed)
        return images_at(
            self.model,
            indices,
            labels,
            self.sampling,
            image_shape=self.latent_shape,
            num_classes=self.num_classes,
            decoder=self.decoder,
        )


class SampleFolder:
    """The images of one `SampleJob` on disk.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.images = self.path / "images"

    def file(self, index: int) -> Path:
        return self.images / f"{index:08d}.png"

    def record(self) -> dict[str, Any] | None:
        """What sampling.json says; None where there is none.

        Raises:
            SampleFolderError: it can't be read.
        """
        path = self.path / "sampling.json"
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise SampleFolderError(f"{path} isn't JSON ({error}); give another folder") from None
        if record.get("format") != FORMAT:
            raise SampleFolderError(f"{path} is of format {record.get('format')!r}, this version reads {FORMAT!r}")
        return record

    def open(self, job: SampleJob) -> None:
        """Make the folder for a job, or check that it is that job's.

        Raises:
            SampleFolderError: it holds images of another job (what differs is listed), or files of someone else.
        """
        record = self.record()
        if record is None:
            if self.images.is_dir() and any(self.images.iterdir()):
                raise SampleFolderError(
                    f"{self.images} holds files but there is no {self.path / 'sampling.json'} that says what they are; "
                    "give another folder"
                )
            content = {"format": FORMAT, "fingerprint": job.fingerprint()}
            write_whole(self.path / "sampling.json", (json.dumps(content, indent=1) + "\n").encode())
            return
        try:
            check_same(f"the samples in {self.path}", record["fingerprint"], "the ones asked for", job.fingerprint())
        except ValueError as error:
            raise SampleFolderError(f"{error}\ngive another folder, or --fresh to delete these samples") from None

    def remove(self) -> None:
        """Delete what this class wrote, and nothing else."""
        for name in ("sampling.json", "grid.png", "samples.npz"):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.images, ignore_errors=True)

    def missing(self, num_images: int) -> list[int]:
        """The numbers below num_images whose image isn't there, or isn't whole (after a power cut)."""
        return [index for index in range(num_images) if not _is_whole(self.file(index))]

    def write(self, index: int, image: Tensor) -> None:
        """Write one image, (C, H, W) uint8, whole or not at all."""
        buffer = BytesIO()
        to_picture(image).save(buffer, format="PNG")
        # Not forced to the disk one by one, which would take longer than making them: `missing` sees a torn file.
        write_whole(self.file(index), buffer.getvalue(), sync=False)

    def read(self, index: int) -> np.ndarray:
        """(C, H, W) uint8."""
        with Image.open(self.file(index)) as picture:
            pixels = np.asarray(picture)
        return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def fill(
    folder: SampleFolder,
    job: SampleJob,
    num_images: int,
    *,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
    check_stop: Callable[[], None] = lambda: None,
) -> int:
    """Make the images 0..num_images - 1 that aren't there yet. A collective over the ranks.

    Args:
        folder: where they go.
        job: what they are.
        num_images: how many there shall be.
        ranks: the processes that share the work; None is this one alone.
        progress: called with (images of this rank done, images of this rank in all).
        check_stop: called between batches; may raise to stop. What is written stays.

    Returns:
        How many images were missing.

    Raises:
        SampleFolderError: the folder holds other images.
        OSError: an image can't be written, on a full disk, say. What is written stays, and the same call goes on.
        FloatingPointError: the model has diverged.
        ValueError: a setting that can't be.
    """
    ranks = ranks or Ranks()
    job.check()
    failure, missing = "", []
    if ranks.is_first:  # one rank looks, so that all see the same folder: others may be writing already
        try:
            folder.open(job)
            folder.images.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(folder.images)
            missing = folder.missing(num_images)
        except SampleFolderError as error:
            failure = str(error)
    failure, missing = ranks.from_first((failure, missing))
    if failure:
        raise SampleFolderError(failure)
    numbers = sorted({index // job.batch_size for index in missing})
    wanted, own = set(missing), ranks.share(numbers)
    with eval_mode(job.model):
        for done, number in enumerate(own, start=1):
            check_stop()
            for index, image in enumerate(job.batch(number), start=number * job.batch_size):
                if index in wanted:
                    folder.write(index, image)
            if progress is not None:
                progress(done * job.batch_size, len(own) * job.batch_size)
    ranks.wait()
    return len(missing)


def write_npz(folder: SampleFolder, job_fingerprint: Mapping[str, Any], num_images: int) -> Path:
    """samples.npz: arr_0 (N, H, W, C) uint8, the layout that others' evaluators read, and arr_1 (N,) int64, classes.

    Written image by image, so N isn't bounded by the memory. Whole or not at all.
    """
    sampling = job_fingerprint["sampling"]
    labels = labels_at(sampling["labels"], torch.arange(num_images), sampling["num_classes"], sampling["seed"])
    first = folder.read(0).transpose(1, 2, 0)
    path = folder.path / "samples.npz"
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
            with archive.open("arr_0.npy", "w", force_zip64=True) as file:
                header = {"descr": "|u1", "fortran_order": False, "shape": (num_images, *first.shape)}
                np.lib.format.write_array_header_1_0(file, header)
                for index in range(num_images):
                    file.write(np.ascontiguousarray(folder.read(index).transpose(1, 2, 0)).tobytes())
            with archive.open("arr_1.npy", "w") as file:
                np.lib.format.write_array(file, labels.numpy(), allow_pickle=False)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def write_folder_grid(folder: SampleFolder, num_images: int, columns: int) -> Path:
    """grid.png: the first images in rows of `columns`."""
    from rowdit.evaluate.grid import write_grid

    images = torch.from_numpy(np.stack([folder.read(index) for index in range(num_images)]))
    write_grid(folder.path / "grid.png", images, columns)
    return folder.path / "grid.png"


def to_picture(image: Tensor) -> Image.Image:
    """(C, H, W) uint8 to a picture: grey for one channel, RGB for three.

    Raises:
        ValueError: another number of channels: latents have no colours.
    """
    if image.shape[0] not in (1, 3):
        raise ValueError(
            f"an image of {image.shape[0]} channels has no colours: a model of latents needs a decoder (--decoder)"
        )
    pixels = image.permute(1, 2, 0).numpy()
    return Image.fromarray(pixels[..., 0] if image.shape[0] == 1 else pixels)


def _is_whole(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            file.seek(-len(_PNG_END), os.SEEK_END)
            return file.read() == _PNG_END
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.EINVAL:  # shorter than the last chunk
            return False
        raise


def _remove_leftovers(folder: Path) -> None:
    """Half-written files of killed processes."""
    leftovers: Iterable[Path] = folder.glob(".*.partial")
    for path in leftovers:
        path.unlink(missing_ok=True)
