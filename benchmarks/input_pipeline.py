"""How many images a second one core reads, from each source, beside what a user would otherwise take.

All contenders give the same: batches of float32 images in [-1, 1] of one size and labels, in random order, in one
process with one thread. They run in turn within each round, over the same images:

    folder, tar, parquet, hf     rowdit's sources, through `rowdit.data.Loader`
    pixels, latents              rowdit's shards: bytes of the identity encoder; means and deviations of 4 x S/8 x S/8
    torch_folder                 torch's DataLoader over a plain Dataset of files: PIL, resize, centre crop, normalise
    webdataset                   the package alone: shuffle, decode, the same transform, batched
    hf_datasets                  `datasets` with a transform, through torch's DataLoader
    torch_npy                    torch's DataLoader over one .npy file an image, mean and deviation, drawn with randn

    python benchmarks/input_pipeline.py --save
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from reporting import RESULTS, Spread, command_line, machine, machine_line, table, write_results
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from rowdit.data import Loader, open_dataset
from rowdit.encode import EncodeOptions, IdentityEncoder, encode_split

PAIRS = (  # ours, what it stands against
    ("folder", "torch_folder"),
    ("tar", "webdataset"),
    ("parquet", "hf_datasets"),
    ("hf", "hf_datasets"),
    ("latents", "torch_npy"),
)
BATCH_SIZE = 32


@dataclass(frozen=True)
class Workload:
    """Images of one kind.

    Args:
        name: in the report.
        width, height: of the files, in pixels.
        format: of the files.
        size: pixels a side of what comes out.
        num_images: how many there are.
    """

    name: str
    width: int
    height: int
    format: str
    size: int
    num_images: int


WORKLOADS = (
    Workload("photographs, JPEG 500 x 375 to 256", 500, 375, "JPEG", 256, 128),
    Workload("icons, PNG 64 x 64 to 64", 64, 64, "PNG", 64, 512),
)


def encoded_images(workload: Workload) -> list[bytes]:
    """Random fields with a photograph's spectrum (amplitude 1 / f): noise would compress and decode unlike one."""
    generator = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(workload.height)[:, None], np.fft.rfftfreq(workload.width)[None])
    frequency[0, 0] = 1
    files = []
    for _ in range(workload.num_images):
        noise = generator.standard_normal((3, workload.height, workload.width))
        field = np.fft.irfft2(np.fft.rfft2(noise) / frequency, s=(workload.height, workload.width))
        pixels = (127.5 + 50 * field / field.std()).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, workload.format, quality=90)
        files.append(file.getvalue())
    return files


def write_all(root: Path, workload: Workload) -> None:
    """The same images in every form."""
    import datasets
    import pyarrow
    import webdataset
    from pyarrow import parquet

    files = encoded_images(workload)
    labels = [place % 10 for place in range(len(files))]
    suffix = {"JPEG": "jpg", "PNG": "png"}[workload.format]
    for place, (data, label) in enumerate(zip(files, labels, strict=True)):
        folder = root / "folder" / f"{label}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{place:05d}.{suffix}").write_bytes(data)
    for name in ("tar", "parquet", "npy"):
        (root / name).mkdir()
    with webdataset.ShardWriter(str(root / "tar" / "%04d.tar"), maxcount=64, verbose=0) as sink:
        for place, (data, label) in enumerate(zip(files, labels, strict=True)):
            sink.write({"__key__": f"{place:05d}", suffix: data, "cls": label})
    rows = pyarrow.table({"image": [{"bytes": data, "path": None} for data in files], "label": labels})
    parquet.write_table(rows, root / "parquet" / "all.parquet", row_group_size=64)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    columns = {"image": [{"bytes": data, "path": None} for data in files], "label": labels}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(root / "hf"))

    pixels = open_dataset(f"tar:{root / 'tar'}", image_size=workload.size, part="all")
    encode_split(pixels, IdentityEncoder(), root / "pixels" / "train")
    encode_split(pixels, Arithmetic(), root / "latents" / "train", EncodeOptions())
    for place in range(len(files)):
        means, deviations = Arithmetic().encode(torch.from_numpy(pixels.fetch(np.array([place]))[0]))
        np.save(root / "npy" / f"{place:05d}.npy", torch.cat([means[0], deviations[0]]).half().numpy())


class Arithmetic:
    """An encoder's shapes at no cost: every eighth pixel, four channels."""

    name, hash, in_channels, downsample_factor, has_deviations = "arithmetic", "0" * 64, 3, 8, True

    def encode(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        means = images[:, [0, 1, 2, 0], ::8, ::8].float() / 127.5 - 1
        return means, means.abs()

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("only the reading is measured")

    def latent_shape(self, image_size: int) -> tuple[int, int, int]:
        return 4, image_size // 8, image_size // 8

    def describe(self) -> dict[str, object]:
        return {"name": self.name, "spec": self.name, "hash": self.hash, "scale": 1.0, "shift": 0.0, "factor": 8}


# ---------------------------------------------------------------------------------------------------- contenders
def rowdit_source(spec: str, size: int | None, num_images: int) -> Iterator[int]:
    options = {} if spec.startswith("latents") else {"part": "all"}
    dataset = open_dataset(spec, image_size=size, **options)
    with Loader(dataset, seed=0, images_seen=0, batch_size=BATCH_SIZE, flip=True) as loader:
        for _ in range(num_images // BATCH_SIZE):
            yield len(next(loader).labels)


def transform(image: Image.Image, size: int) -> torch.Tensor:
    """As in the usual pipelines: the short side to ``size``, the middle, [-1, 1]."""
    image = image.convert("RGB")
    scale = size / min(image.size)
    if scale != 1:
        image = image.resize(tuple(round(side * scale) for side in image.size), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    pixels = torch.from_numpy(np.array(image.crop((left, top, left + size, top + size))))
    return pixels.permute(2, 0, 1).float() / 127.5 - 1


class PlainFolder(TorchDataset):
    """What tutorials write."""

    def __init__(self, root: Path, size: int) -> None:
        self.files = [(path, int(path.parent.name)) for path in sorted(root.glob("*/*"))]
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        with Image.open(path) as image:
            pixels = transform(image, self.size)
        return (pixels.flip(-1) if torch.rand(()) < 0.5 else pixels), label


class PlainLatents(TorchDataset):
    """One file an image."""

    def __init__(self, root: Path) -> None:
        self.files = sorted(root.iterdir())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        means, deviations = torch.from_numpy(np.load(self.files[index])).float().chunk(2)
        return means + deviations * torch.randn_like(means), index % 10


def torch_loader(dataset: TorchDataset) -> Iterator[int]:
    for _, labels in DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True):
        yield len(labels)


def webdataset_alone(root: Path, size: int) -> Iterator[int]:
    import webdataset

    shards = sorted(str(path) for path in root.iterdir())
    stream = (
        webdataset.WebDataset(shards, shardshuffle=len(shards))
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg;png", "cls")
        .map_tuple(lambda image: transform(image, size))
        .batched(BATCH_SIZE, partial=False)
    )
    for _, labels in stream:
        yield len(labels)


def datasets_alone(root: Path, size: int) -> Iterator[int]:
    import datasets

    rows = datasets.load_from_disk(str(root))
    rows = rows.with_transform(
        lambda batch: {"image": [transform(image, size) for image in batch["image"]], "label": batch["label"]}
    )
    for batch in DataLoader(rows, batch_size=BATCH_SIZE, shuffle=True, drop_last=True):
        yield len(batch["label"])


def contenders(root: Path, workload: Workload) -> dict[str, Callable[[], Iterator[int]]]:
    size, num = workload.size, workload.num_images
    ours = {name: f"{name}:{root / name}" for name in ("folder", "tar", "parquet", "hf")}
    shards = {name: f"latents:{root / name}" for name in ("pixels", "latents")}
    return {
        **{name: lambda spec=spec: rowdit_source(spec, size, num) for name, spec in ours.items()},
        **{name: lambda spec=spec: rowdit_source(spec, None, num) for name, spec in shards.items()},
        "torch_folder": lambda: torch_loader(PlainFolder(root / "folder", size)),
        "webdataset": lambda: webdataset_alone(root / "tar", size),
        "hf_datasets": lambda: datasets_alone(root / "hf", size),
        "torch_npy": lambda: torch_loader(PlainLatents(root / "npy")),
    }


def rate(run: Callable[[], Iterator[int]]) -> float:
    """Images a second of processor time, from the first batch on: opening isn't what is asked.

    Processor time is what a core has to give, and other processes on the machine hardly change it. All contenders read
    from the page cache, in this process and thread.
    """
    batches = iter(run())
    next(batches)
    start, num_images = time.process_time(), 0
    for count in batches:
        num_images += count
    return num_images / (time.process_time() - start)


def measure(workload: Workload, num_rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = os.environ["HF_HOME"] = f"{folder}/cache"
        root = Path(folder)
        write_all(root, workload)
        runs = contenders(root, workload)
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for round_number in range(num_rounds + 1):  # the first warms the page cache and the imports
            for name, run in runs.items():
                value = rate(run)
                if round_number:
                    rates[name].append(value)
    return rates


def report(results: dict[str, dict[str, list[float]]], facts: dict[str, object], num_rounds: int) -> str:
    names = list(next(iter(results.values())))
    speeds = [[name, *(Spread.of(rates[name]).show() for rates in results.values())] for name in names]
    ratios = [
        [f"{ours} / {theirs}", *(Spread.of(ratio(rates, ours, theirs)).show() for rates in results.values())]
        for ours, theirs in PAIRS
    ]
    return f"""# Input pipeline, images a second and core

`{command_line()}`

{machine_line(facts)}; one process, one thread, no workers.
Median [quartiles] of {num_rounds} rounds; in each round all contenders run in turn over the same images. {BATCH_SIZE}
images a batch, float32 in [-1, 1]; files are in the page cache. Seconds are of processor time.

{table(["images / s", *results], speeds)}

What one of ours reads for each image of what a user would otherwise take:

{table(["ratio", *results], ratios)}

`folder`, `tar`, `parquet`, `hf` decode images; `pixels` and `latents` read shards of `rowdit encode`. `torch_folder`
is torch's DataLoader over a plain Dataset of files, `webdataset` and `hf_datasets` are those packages alone,
`torch_npy` is torch's DataLoader over one file of mean and deviation an image. A rank that trains on G images a second
needs G / (images a second and core) worker processes (`--data.num-workers`).
"""


def ratio(rates: dict[str, list[float]], ours: str, theirs: str) -> list[float]:
    return [a / b for a, b in zip(rates[ours], rates[theirs], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, help="of each workload; by default 128 photographs and 512 icons")
    parser.add_argument("--save", action="store_true", help="write results/input_pipeline.md and .json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for workload in WORKLOADS:
        if options.images:
            workload = Workload(**(vars(workload) | {"num_images": options.images}))
        results[workload.name] = measure(workload, options.rounds)
    facts = machine()
    text = report(results, facts, options.rounds)
    print(text)
    if options.save:
        write_results(RESULTS / "input_pipeline", {"machine": facts, "images_per_second": results}, text)


if __name__ == "__main__":
    main()
