"""`rowdit eval`: how good images are, with everything that is needed to get the same number again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from rowdit.commands.limits import check_count, check_images
from rowdit.commands.outputs import check_file, check_folder
from rowdit.commands.parsing import fail, parse, set_threads
from rowdit.commands.sample import (
    MOST_IMAGES,
    SamplerOptions,
    bar,
    check_sampler,
    default_folder,
    sample_job,
    with_batch_size_of,
)

if TYPE_CHECKING:
    import torch

    from rowdit.evaluate.extract import Extracted
    from rowdit.evaluate.features import FeatureNetwork
    from rowdit.evaluate.images import ImageSource
    from rowdit.evaluate.ranks import Ranks
    from rowdit.evaluate.reference import Reference
    from rowdit.evaluate.score import Score


@dataclass(frozen=True)
class EvalOptions:
    """Scores images against a reference: of a run (which are made first), in a folder, or in an npz or npy file. The
    same command goes on where a kill or Ctrl-C left it. Works under torchrun, with the same scores.

    Args:
        target: folder of a run, a file that rowdit export wrote, folder of images, or a file of arrays.
        reference: real images: statistics (.safetensors), a folder, a file of arrays, a dataset such as bundled or
            folder:PATH, or moments:FILE.npz for mu and sigma that others published, which only you can vouch for. Of a
            run on pixels it is by default the reference split of its data.
        network: of the features.
        weights: the network's weights file, where they aren't installed.
        download: fetch the network's published weights if they aren't here.
        metrics: comma-separated, of fd, kid, precision, recall, density, coverage.
        num_images: of a run, its evaluations' num_samples by default; of other images all.
        reference_images: how many of the reference, a random draw; all by default.
        image_size: crop and resize the target's images to this many pixels a side; by default they are taken as they
            are. The reference is always brought to the target's size.
        floor: real images that aren't in the reference, to be scored beside; of a run on pixels by default the training
            split of its data. "none" leaves them out.
        out: folder for scores.json; by default RUN/evaluation, or out/eval.
        cache: folder for features; by default rowdit/features in the user's cache.
        save_statistics: write the reference's statistics and features to this file, to be used as --reference.
        compare: an earlier scores.json; refused if the two don't belong together.
        step: of a run's checkpoint; the newest by default.
        which: the averaged weights (ema), those as trained (model), or the label of another average.
        decoder: autoencoder of a model of latents; by default the one that made the latents.
        device: such as cuda:1; by default the GPU of LOCAL_RANK, or the CPU.
        threads: processor threads; all cores by default.
        sampling: how a run's images are made.
    """

    target: tyro.conf.Positional[Path]
    reference: str | None = None
    network: Literal["effnet_lite0", "inception", "inception_pytorch_fid", "dinov2_vitl14"] = "effnet_lite0"
    weights: Path | None = None
    download: bool = False
    metrics: str = "fd,kid,precision,recall,density,coverage"
    num_images: int | None = None
    reference_images: int | None = None
    image_size: int | None = None
    floor: str | None = None
    out: Path | None = None
    cache: Path | None = None
    save_statistics: Path | None = None
    compare: Path | None = None
    step: int | None = None
    which: str = "ema"
    decoder: str | None = None
    device: str | None = None
    threads: int | None = None
    sampling: tyro.conf.OmitArgPrefixes[SamplerOptions] = SamplerOptions()


@dataclass(frozen=True)
class Target:
    """The images that are to be scored.

    Args:
        source: the images.
        num_images: how many of them; None is all.
        samples: the fingerprint of `SampleJob`, if they are samples; None for images of unknown origin.
        data: the run's data source, for the reference; None where there is no run, or it is of latents.
        reading: how the run reads its data.
        out: default folder of the scores.
    """

    source: ImageSource
    num_images: int | None
    samples: Mapping[str, Any] | None
    data: str | None
    out: Path
    reading: Mapping[str, Any] = field(default_factory=dict)

    @property
    def made_by(self) -> dict[str, Any] | None:
        """How they were made: of the fingerprint all but the model, so that scores of two models can be compared."""
        if self.samples is None:
            return None
        return {**self.samples["sampling"], "decoder": self.samples["decoder"]}


def run(arguments: list[str]) -> int:
    options = parse("eval", EvalOptions, arguments)
    from rowdit.commands.loading import open_device
    from rowdit.evaluate.evaluation import check_metrics
    from rowdit.evaluate.ranks import joined

    set_threads(options.threads)
    check_folder(options.out)
    check_folder(options.cache, "--cache")
    check_file(options.save_statistics, "--save-statistics", suffix=".safetensors")
    try:
        check_metrics(_metrics(options))
        check_sampler(options.sampling)
        for name in ("reference", "floor", "decoder"):
            if getattr(options, name) == "":
                raise ValueError(f"--{name} is empty: name something, or leave --{name} out")
        for name in ("num_images", "reference_images"):
            check_count(name, getattr(options, name), least=2, most=MOST_IMAGES)
        check_count("image_size", options.image_size)
        check_images(1, options.image_size, 3, name="images at once:")
        with joined() as ranks:
            _evaluate(options, ranks, open_device(options.device))
    except (ValueError, FloatingPointError) as error:
        return fail(str(error))
    return 0


def _metrics(options: EvalOptions) -> list[str]:
    return [name.strip() for name in options.metrics.split(",") if name.strip()]


def _evaluate(options: EvalOptions, ranks: Ranks, device: torch.device) -> None:
    from rowdit.evaluate.evaluation import score, values

    network = _open_network(options, ranks, device)
    target = _open_target(options, ranks, device, network)
    work = _Work(options, ranks, network, options.cache or default_cache())
    opened = work.open_reference(target)
    extracted = work.extract("target", target.source, target.num_images, first=target.samples is not None)
    reference = work.reference(opened)
    floor = work.floor(target, reference, extracted)
    if not ranks.is_first:
        return
    assert extracted is not None and reference is not None
    floor_values = None if floor is None else values(floor.features, reference, _metrics(options))
    scores = score(extracted, reference, _metrics(options), floor=floor_values, made_by=target.made_by)
    record = {
        "target": str(options.target),
        "images": extracted.dataset,
        "model": None if target.samples is None else target.samples["model"],
        "floor_images": None if floor is None else floor.dataset,
        "scores": [one.to_json() for one in scores],
    }
    earlier = {} if options.compare is None else _read_scores(options.compare)
    for one in scores:
        if one.name in earlier:
            one.check_comparable(earlier[one.name])
    if options.save_statistics:
        reference.save(options.save_statistics)
    path = (options.out or target.out) / "scores.json"
    _write(path, record)
    _print(record, scores, earlier, path)


class _Work:
    """What is computed of images by one network, over the ranks, kept in one cache."""

    def __init__(self, options: EvalOptions, ranks: Ranks, network: FeatureNetwork, cache: Path) -> None:
        self.options, self.ranks, self.network, self.cache = options, ranks, network, cache

    def extract(self, what: str, source: ImageSource, num: int | None, *, first: bool = False) -> Extracted | None:
        from rowdit.evaluate.evaluation import check_enough
        from rowdit.evaluate.extract import choose, extract

        indices = choose(len(source), num, f"the {what}", first=first)
        check_enough(len(indices), f"images of the {what}", self.network.dim, _metrics(self.options))
        with bar(f"features of the {what}", self.ranks.is_first) as progress:
            return extract(source, indices, self.network, self.cache, ranks=self.ranks, progress=progress)

    def open_reference(self, target: Target) -> Reference | ImageSource:
        """Statistics, or images that statistics are to be made of, once they are known to fit the target."""
        from rowdit.evaluate.images import open_images
        from rowdit.evaluate.reference import Reference, check_fits

        spec = _reference_of(self.options, target.data)
        channels, size, _ = target.source.image_shape
        if spec.endswith(".safetensors"):
            reference = Reference.load(spec)
            found = {"network": self.network.fingerprint(), "image_shape": list(target.source.image_shape)}
            check_fits("the images", found, reference)
            return reference
        if spec.startswith("moments:"):
            return _published(Path(spec.removeprefix("moments:")).expanduser(), self.network, _metrics(self.options))
        reading = {} if self.options.reference else target.reading
        source = open_images(spec, image_size=_size_of(spec, size), channels=channels, reading=reading)
        _check_shape(spec, source, target)
        return source

    def reference(self, opened: Reference | ImageSource) -> Reference | None:
        """On rank 0; None on the others."""
        from rowdit.evaluate.evaluation import reference_of
        from rowdit.evaluate.reference import Reference

        if isinstance(opened, Reference):
            return opened if self.ranks.is_first else None
        extracted = self.extract("reference", opened, self.options.reference_images)
        return None if extracted is None else reference_of(extracted)

    def floor(self, target: Target, reference: Reference | None, extracted: Extracted | None) -> Extracted | None:
        """Features of as many real images that aren't in the reference; None where there are none, and off rank 0."""
        from rowdit.evaluate.images import ImagesError, open_images

        spec = self.options.floor or target.data
        if spec is None or spec == "none":
            return None
        channels, size, _ = target.source.image_shape
        reading = {} if self.options.floor else target.reading
        source = open_images(spec, image_size=_size_of(spec, size), channels=channels, split="train", reading=reading)
        _check_shape(spec, source, target)
        num = self.ranks.from_first(len(extracted.features) if extracted is not None else None)
        if len(source) < num:
            raise ImagesError(
                f"the floor at {num} images needs as many real ones, {spec} has {len(source)}; name more with --floor, "
                "score fewer images (--num-images), or leave it out with --floor none"
            )
        floor = self.extract("floor", source, num)
        if floor is not None and reference is not None and floor.dataset == reference.fingerprint["dataset"]:
            raise ImagesError(
                f"the floor needs real images that are not in the reference, but both are {floor.dataset!r}; "
                "name others with --floor, or leave it out with --floor none"
            )
        return floor


def _published(path: Path, network: FeatureNetwork, metrics: list[str]) -> Reference:
    """Moments of others, as far as it can be told that they fit; before anything takes long."""
    from rowdit.evaluate.reference import published_moments

    reference = published_moments(path)
    if reference.statistics.dim != network.dim:
        raise ValueError(f"{path} is of {reference.statistics.dim} features, {network.name} has {network.dim}")
    if metrics != ["fd"]:
        raise ValueError(f"{path} has moments and no features: only fd can be measured, --metrics fd")
    return reference


def _reference_of(options: EvalOptions, data: str | None) -> str:
    """What to compare with: what the user names, or the run's own data."""
    from rowdit.evaluate.images import ImagesError

    spec = options.reference or data
    if spec is None:
        raise ImagesError(
            "there is nothing to compare with: name real images with --reference, a folder, a file of arrays, "
            "statistics (.safetensors) or a dataset"
        )
    return spec


def default_cache() -> Path:
    """Where features are kept: rowdit/features in the user's cache."""
    from rowdit.data.fashion_mnist import cache_folder

    return cache_folder().parent / "features"


def _size_of(spec: str, size: int) -> int | None:
    """The size to bring images to; arrays are taken as they are."""
    return None if spec.endswith((".npz", ".npy")) else size


def _check_shape(spec: str, source: ImageSource, target: Target) -> None:
    from rowdit.evaluate.images import ImagesError

    if tuple(source.image_shape) != tuple(target.source.image_shape):
        raise ImagesError(
            f"the images are {target.source.image_shape} (channels, height, width), those of {spec} "
            f"{source.image_shape}; both must be alike: --image-size brings images of a folder to a size"
        )


def _open_network(options: EvalOptions, ranks: Ranks, device: torch.device) -> FeatureNetwork:
    from rowdit.evaluate.networks import open_network, published_weights

    published = published_weights(options.network)
    if options.download and published is not None and ranks.is_first:
        with bar(f"fetching {published.name}", True) as progress:
            published.download(lambda _, done, total: progress(done, total))
    ranks.wait()
    return open_network(options.network, device, weights=options.weights)


def _open_target(options: EvalOptions, ranks: Ranks, device: torch.device, network: FeatureNetwork) -> Target:
    from rowdit.evaluate.images import ImagesError, is_run, open_images
    from rowdit.evaluate.sample_folder import SampleFolder

    path = options.target.expanduser()
    if is_run(path) or path.suffix == ".safetensors":
        return _sampled_run(options, path, ranks, device, network)
    out = Path("out/eval")
    folder = SampleFolder(path)
    record = folder.record() if path.is_dir() else None
    if record is None:
        source = open_images(path, image_size=options.image_size)
        return Target(source, options.num_images, None, None, out)
    num_there = len(list(folder.images.glob("*.png")))
    num_images = options.num_images or num_there
    missing = folder.missing(num_images)
    if missing:
        raise ImagesError(
            f"{path} has {num_images - len(missing)} of the {num_images} samples 0..{num_images - 1} (first missing: "
            f"{missing[0]}); finish it with rowdit sample, or score fewer with --num-images"
        )
    return Target(_samples(folder, num_images, options), num_images, record["fingerprint"], None, path)


def _sampled_run(
    options: EvalOptions, path: Path, ranks: Ranks, device: torch.device, network: FeatureNetwork
) -> Target:
    """The target that a run's samples are, made where they aren't there."""
    from rowdit.commands.loading import open_model
    from rowdit.evaluate.evaluation import check_enough
    from rowdit.evaluate.sample_folder import SampleFolder, fill

    loaded = open_model(path, options.which, device, step=options.step, decoder=options.decoder)
    num_images = options.num_images or loaded.config.evaluate.num_samples
    check_enough(num_images, "samples", network.dim, _metrics(options))
    data = None if loaded.decoder is not None else loaded.config.data.source
    _reference_of(options, data)  # asked for before hours of sampling
    job = sample_job(loaded, options.sampling, num_images)
    folder = SampleFolder(default_folder(path, job, options.sampling))
    job = with_batch_size_of(folder, job, options.sampling, ranks)
    with bar("sampling", ranks.is_first) as progress:
        fill(folder, job, num_images, ranks=ranks, progress=progress)
    home = path / "evaluation" if path.is_dir() else path.with_name(f"{path.stem}-evaluation")
    reading = {"num_classes": loaded.config.model.num_classes, **loaded.config.data.options()}
    samples, scores = _samples(folder, num_images, options), home / folder.path.name
    return Target(samples, num_images, job.fingerprint(), data, scores, reading)


def _samples(folder: Any, num_images: int, options: EvalOptions) -> ImageSource:
    from rowdit.evaluate.images import FolderImages

    return FolderImages(folder.images, options.image_size, limit=num_images)


def _read_scores(path: Path) -> dict[str, Score]:
    from rowdit.evaluate.images import ImagesError
    from rowdit.evaluate.score import Score

    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {one["name"]: Score.from_json(one) for one in record["scores"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImagesError(f"{path} holds no scores ({error}); give the scores.json of an evaluation") from None


def _write(path: Path, record: Mapping[str, Any]) -> None:
    from rowdit.evaluate.fingerprint import write_whole

    write_whole(path, (json.dumps(record, indent=1) + "\n").encode())


def _print(record: Mapping[str, Any], scores: list[Score], earlier: Mapping[str, Score], path: Path) -> None:
    fingerprint = scores[0].fingerprint
    print(f"images     {record['images']}")
    num_reference = fingerprint["reference"]["num_images"] or "an unknown number of"
    print(f"reference  {fingerprint['reference']['dataset']} ({num_reference} images)")
    print(f"network    {fingerprint['network']['name']}, sha256 {fingerprint['network']['sha256'][:16]}")
    print(f"{'':30}{'score':>12}{'real images':>14}{'earlier' if earlier else '':>12}")
    for one in scores:
        floor = "" if one.floor is None else f"{one.floor:.5g}"
        before = f"{earlier[one.name].value:.5g}" if one.name in earlier else ""
        print(f"{one.name:30}{one.value:>12.5g}{floor:>14}{before:>12}")
    print(f"scores     {path}")
