"""`rowdit sample`: images from a trained model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from rowdit.commands.limits import check_count, check_images
from rowdit.commands.outputs import check_folder
from rowdit.commands.parsing import fail, parse, set_threads

if TYPE_CHECKING:
    from rowdit.commands.loading import LoadedModel
    from rowdit.evaluate.generate import Progress
    from rowdit.evaluate.ranks import Ranks
    from rowdit.evaluate.sample_folder import SampleFolder, SampleJob


MOST_IMAGES = 10**7  # each is a file, and its number is kept in lists
MOST_COLUMNS = 1000
MOST_STEPS = 10**5


@dataclass(frozen=True)
class SamplerOptions:
    """How images are made. What isn't given is as in the run's own evaluations.

    Args:
        sampler: euler, heun (two model calls a step) or dpm (DPM-Solver++(2M)).
        num_steps: steps of the sampler.
        guidance: scale of classifier-free guidance; 1 is none.
        guidance_interval: LOW HIGH, the times in [0, 1] at which to guide (0 is data, 1 noise); at all by default.
        time_shift: above 1 more of the steps are spent near the noise.
        labels: the classes: balanced, random, null (no class), or numbers to take in turns: 0,5,7.
        seed: of the noise; image i depends on (seed, i) alone.
        precision: float32, or bfloat16 through autocast.
        batch_size: images at once; by default 64, or as many as are asked for; where samples are, theirs.
    """

    sampler: Literal["euler", "heun", "dpm"] | None = None
    num_steps: int | None = None
    guidance: float | None = None
    guidance_interval: tuple[float, float] | None = None
    time_shift: float | None = None
    labels: str = "balanced"
    seed: int | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    batch_size: int | None = None


@dataclass(frozen=True)
class SampleOptions:
    """Makes images from a trained model: OUT/images/00000000.png and on, a grid, and an npz if asked for. The same
    command goes on where a kill or Ctrl-C left it, and makes more where more are asked for. Works under torchrun.

    Args:
        run: folder of a run, or a file that rowdit export wrote.
        num_images: how many.
        out: folder for them; by default RUN/samples/ (of an exported file NAME-samples/) and a name that stands for the
            settings.
        step: of the checkpoint; the newest by default.
        which: the averaged weights (ema), those as trained (model), or the label of another average.
        decoder: autoencoder of a model of latents, such as vae:FOLDER; by default the one that made the latents.
        grid: the first so many images as one picture, OUT/grid.png; 0 makes none.
        columns: of the grid; by default one a class, up to 12, else 10.
        npz: also write OUT/samples.npz, as other evaluators read it.
        fresh: delete the samples that are in OUT first.
        device: such as cuda:1; by default the GPU of LOCAL_RANK, or the CPU.
        threads: processor threads; all cores by default.
        sampling: how they are made.
    """

    run: tyro.conf.Positional[Path]
    num_images: int = 64
    out: Path | None = None
    step: int | None = None
    which: str = "ema"
    decoder: str | None = None
    grid: int = 64
    columns: int | None = None
    npz: bool = False
    fresh: bool = False
    device: str | None = None
    threads: int | None = None
    sampling: tyro.conf.OmitArgPrefixes[SamplerOptions] = SamplerOptions()


def run(arguments: list[str]) -> int:
    options = parse("sample", SampleOptions, arguments)
    from rowdit.commands.loading import open_device, open_model
    from rowdit.evaluate.ranks import joined

    set_threads(options.threads)
    check_folder(options.out)
    try:
        _check(options)
        with joined() as ranks:
            device = open_device(options.device)
            loaded = open_model(options.run, options.which, device, step=options.step, decoder=options.decoder)
            _sample(options, sample_job(loaded, options.sampling, options.num_images), ranks)
    except (ValueError, FloatingPointError) as error:
        return fail(str(error))
    return 0


def sample_job(loaded: LoadedModel, options: SamplerOptions, num_images: int) -> SampleJob:
    """The job that the options ask for; what they leave open is as in the run's own evaluations."""
    from rowdit.evaluate.sample_folder import SampleJob
    from rowdit.evaluate.score import Sampling

    default = loaded.config.evaluate
    sampling = Sampling(
        sampler=default.sampler if options.sampler is None else options.sampler,
        num_steps=default.num_steps if options.num_steps is None else options.num_steps,
        guidance=default.guidance if options.guidance is None else options.guidance,
        guidance_interval=options.guidance_interval or default.guidance_interval,
        time_shift=default.time_shift if options.time_shift is None else options.time_shift,
        seed=default.seed if options.seed is None else options.seed,
        ema=_decay_of(loaded),
        precision=options.precision,
    )
    return SampleJob(
        model=loaded.model,
        model_fingerprint=loaded.fingerprint,
        sampling=sampling,
        latent_shape=loaded.latent_shape,
        num_classes=loaded.config.model.num_classes,
        labels=options.labels,
        batch_size=min(64, num_images) if options.batch_size is None else options.batch_size,
        decoder=loaded.decoder,
    )


def _decay_of(loaded: LoadedModel) -> float | None:
    """Of the average that is sampled from, which goes into scores' fingerprints; None for what has no one decay."""
    if loaded.which == "ema":
        return loaded.config.train.ema_decay
    return float(loaded.which.removeprefix("ema_")) if loaded.which.startswith("ema_") else None


def default_folder(run: Path, job: SampleJob, options: SamplerOptions) -> Path:
    """RUN/samples/ema-0000400-3fa9c1d2: equal settings have the same folder, others another. The batch size is one of
    them where the user gave it."""
    from rowdit.evaluate.fingerprint import digest

    left_out = ("batch_size",) if options.batch_size is None else ()
    fingerprint = {key: value for key, value in job.fingerprint().items() if key not in left_out}
    which, step = fingerprint["model"]["which"], fingerprint["model"]["step"]
    home = run / "samples" if run.is_dir() else run.with_name(f"{run.stem}-samples")
    return home / f"{which.split(',')[0]}-{step:07d}-{digest(fingerprint)[:8]}"


def with_batch_size_of(folder: SampleFolder, job: SampleJob, options: SamplerOptions, ranks: Ranks) -> SampleJob:
    """The job with the batch size of the samples that are in the folder, unless the user gave one."""
    record = ranks.from_first(folder.record() if ranks.is_first else None)
    if record is None or options.batch_size is not None:
        return job
    return dataclasses.replace(job, batch_size=record["fingerprint"]["batch_size"])


@contextmanager
def bar(what: str, shown: bool) -> Iterator[Progress]:
    """A progress bar on the error stream, as a function of (done, in all)."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), disable=not shown) as rich_bar:
        task = rich_bar.add_task(what, total=None, visible=False)  # nothing is shown where there is nothing to do
        yield lambda done, total: rich_bar.update(task, completed=done, total=total, visible=True)


def _check(options: SampleOptions) -> None:
    check_count("num_images", options.num_images, most=MOST_IMAGES)
    check_count("grid", options.grid, least=0, most=MOST_IMAGES)
    check_count("columns", options.columns, most=MOST_COLUMNS)
    check_sampler(options.sampling)


def check_sampler(options: SamplerOptions) -> None:
    """Raises ConfigError for counts that can't be meant."""
    check_count("batch_size", options.batch_size, most=MOST_IMAGES)
    check_count("num_steps", options.num_steps, most=MOST_STEPS)
    check_count("seed", options.seed, least=0, most=2**63 - 1)


def _sample(options: SampleOptions, job: SampleJob, ranks: Ranks) -> None:
    from rowdit.evaluate.sample_folder import SampleFolder, fill, write_folder_grid, write_npz

    channels, size, _ = job.latent_shape
    check_images(job.batch_size, size, channels, bytes_each=8)  # images and noise
    if options.grid:
        check_images(min(options.grid, options.num_images), size, channels, name="grid")
    folder = SampleFolder(options.out or default_folder(options.run, job, options.sampling))
    if options.fresh and ranks.is_first:
        folder.remove()
    job = with_batch_size_of(folder, job, options.sampling, ranks)
    with bar("sampling", ranks.is_first) as progress:
        num_made = fill(folder, job, options.num_images, ranks=ranks, progress=progress)
    if not ranks.is_first:
        return
    print(f"images   {folder.images} ({options.num_images}, of which {num_made} new)")
    if options.grid:
        columns = options.columns or (job.num_classes if job.num_classes <= 12 else 10)
        print(f"grid     {write_folder_grid(folder, min(options.grid, options.num_images), columns)}")
    if options.npz:
        print(f"npz      {write_npz(folder, job.fingerprint(), options.num_images)}")
