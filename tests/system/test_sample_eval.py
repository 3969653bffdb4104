"""`rowdit sample` and `rowdit eval` as a user calls them: alone and under torchrun, killed and gone on, refused."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rowdit import cli
from rowdit.train.config import DataConfig
from rowdit.train.loop import train
from toy_training import toy_config, toy_dataset

SRC = Path(__file__).parents[2] / "src"
METRICS = ["--metrics", "kid,precision,coverage"]  # so few images are none for a covariance


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(toy_config(), toy_dataset(), folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> tuple[Path, Path]:
    """Real images: a folder of them, and others as arrays."""
    folder = tmp_path_factory.mktemp("real")
    images = toy_dataset(60, seed=1).images
    (folder / "some").mkdir()
    for i, image in enumerate(images[:30]):
        Image.fromarray(image[0]).save(folder / "some" / f"{i:02d}.png")
    np.savez(folder / "others.npz", arr_0=images[30:].transpose(0, 2, 3, 1))
    return folder / "some", folder / "others.npz"


def call(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **more}


def images_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "images").iterdir())}


def scores_in(folder: Path) -> dict[str, dict]:
    return {score["name"]: score for score in json.loads((folder / "scores.json").read_text())["scores"]}


def torchrun(num: int, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num)]
    command += ["-m", "rowdit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment())


def test_samples_and_scores_are_the_same_on_two_ranks(run, real, tmp_path, capsys):
    """One torchrun does it all: it samples, computes features and scores."""
    some, others = real
    arguments = ["--num-images", 26, "--batch-size", 4, "--guidance", 2.0, "--guidance-interval", 0.1, 0.9, *METRICS]
    arguments += ["--sampler", "dpm", "--num-steps", 3, "--reference", some, "--floor", others]
    assert call("eval", run, *arguments, "--out", tmp_path / "one") == 0
    (samples,) = (run / "samples").glob("ema-*")
    alone = images_in(samples)
    assert len(alone) == 26
    for file in (samples / "images").iterdir():
        file.unlink()
    done = torchrun(2, "eval", run, *arguments, "--out", tmp_path / "two", "--cache", tmp_path / "other")
    assert done.returncode == 0, done.stderr
    assert images_in(samples) == alone
    assert scores_in(tmp_path / "two") == scores_in(tmp_path / "one")
    kid = scores_in(tmp_path / "two")["kid_effnet_lite0"]
    assert kid["floor"] is not None and kid["fingerprint"]["num_images"] == 26
    assert kid["fingerprint"]["sampling"]["guidance_interval"] == [0.1, 0.9]
    assert "kid_effnet_lite0" in done.stdout


def test_killed_in_the_middle(run, tmp_path):
    arguments = ["sample", run, "--num-images", 400, "--batch-size", 4, "--num-steps", 4, "--grid", 0, "--out"]
    command = [sys.executable, "-m", "rowdit", *map(str, arguments), str(tmp_path / "killed")]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    images = tmp_path / "killed" / "images"
    while not (images / "00000010.png").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    num_there = len(list(images.glob("*.png")))
    assert 10 < num_there < 400, "killed too late to mean anything"
    assert call(*arguments, tmp_path / "killed") == 0
    assert call(*arguments, tmp_path / "whole") == 0
    assert images_in(tmp_path / "killed") == images_in(tmp_path / "whole")


def test_more_images_later_and_what_is_written_beside_them(run, tmp_path, capsys):
    assert call("sample", run, "--num-images", 5, "--npz", "--which", "model") == 0
    assert call("sample", run, "--num-images", 9, "--npz", "--which", "model", "--columns", 4, "--grid", 8) == 0
    (folder,) = (run / "samples").glob("model-*")
    assert "9, of which 4 new" in capsys.readouterr().out
    assert Image.open(folder / "grid.png").size == (4 * 8, 2 * 8)
    assert call("sample", run, "--num-images", 5, "--which", "model", "--batch-size", 3) == 0
    assert len(list((run / "samples").glob("model-*"))) == 2, "a batch size that is asked for is a setting"
    with np.load(folder / "samples.npz") as content:
        assert content["arr_0"].shape == (9, 8, 8, 1) and content["arr_1"].tolist() == [0, 1, 2] * 3


def test_an_export_makes_the_same_images(run, tmp_path):
    from rowdit.train.export import export

    export(run, tmp_path / "model.safetensors")
    for source, out in ((run, "a"), (tmp_path / "model.safetensors", "b")):
        assert call("sample", source, "--num-images", 6, "--out", tmp_path / out) == 0
    assert images_in(tmp_path / "a") == images_in(tmp_path / "b")


def test_latents_are_decoded_by_the_autoencoder_that_made_them(tmp_path, capsys):
    from rowdit.data import open_dataset
    from rowdit.encode import encode_split, open_encoder
    from rowdit.encode.train_vae import VAETraining, train_vae
    from rowdit.models.vae import VAEConfig

    small = VAEConfig(in_channels=1, latent_channels=2, downsample_factor=2, hidden_channels=8)
    train_vae(toy_dataset(), tmp_path / "vae", small, VAETraining(steps=4, batch_size=8))
    encoder = open_encoder(f"vae:{tmp_path / 'vae'}")
    for split in ("train", "reference"):
        encode_split(toy_dataset(seed=len(split)), encoder, tmp_path / "latents" / split)
    source = f"latents:{tmp_path / 'latents'}"
    config = dataclasses.replace(
        toy_config(steps=2),
        data=DataConfig(source=source),
        model=dataclasses.replace(toy_config().model, image_size=4, in_channels=2),
    )
    train(config, open_dataset(source), tmp_path / "run")
    assert call("sample", tmp_path / "run", "--num-images", 5, "--out", "s") == 0
    assert Image.open(tmp_path / "s" / "images" / "00000004.png").size == (8, 8)
    decoder = json.loads((tmp_path / "s" / "sampling.json").read_text())["fingerprint"]["decoder"]
    assert decoder["hash"] == encoder.hash and "spec" not in decoder
    assert call("eval", tmp_path / "run", *METRICS) == 2, "a latent is no image to compare with"
    assert "name real images with --reference" in capsys.readouterr().err


def test_statistics_are_kept_and_scores_compared(run, real, tmp_path, capsys):
    some, others = real
    statistics = tmp_path / "real.safetensors"
    assert call("eval", others, "--reference", some, "--save-statistics", statistics, "--out", "a", *METRICS) == 0
    assert call("eval", others, "--reference", statistics, "--out", "b", "--compare", "a/scores.json", *METRICS) == 0
    assert scores_in(tmp_path / "a") == scores_in(tmp_path / "b")
    assert "earlier" in capsys.readouterr().out
    assert call("eval", others, "--reference", others, "--compare", "a/scores.json", *METRICS) == 2
    error = capsys.readouterr().err
    assert "don't belong together, they differ in" in error and "reference.dataset: " in error


def test_unfinished_samples_are_not_scored(run, real, tmp_path, capsys):
    assert call("sample", run, "--num-images", 8, "--out", tmp_path / "s") == 0
    (tmp_path / "s" / "images" / "00000005.png").unlink()
    assert call("eval", tmp_path / "s", "--num-images", 8, "--reference", real[0], *METRICS) == 2
    assert "has 7 of the 8 samples 0..7 (first missing: 5)" in capsys.readouterr().err
    assert call("eval", tmp_path / "s", "--num-images", 5, "--reference", real[0], "--metrics", "kid") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sample", "nix"], "nix doesn't exist; name the folder"),
        (["sample", "RUN", "--num-images", "0"], "num_images = 0: must be an integer >= 1"),
        (["sample", "RUN", "--labels", "0,3"], "there is no class 3; the model has 0..2"),
        (["sample", "RUN", "--which", "ema_0.5"], "holds no 'ema_0.5'; it holds ema, model"),
        (["sample", "RUN", "--step", "7"], "no checkpoint of step 7; complete are: 8, 12"),
        (["sample", "RUN", "--time-shift", "0"], "shift is 0.0"),
        (["sample", "RUN", "--device", "nix"], "--device nix"),
        (["eval", "OVER"], "OVER has no complete checkpoint; name the folder"),
        (["eval", "OTHERS"], "nothing to compare with: name real images with --reference"),
        (["eval", "OTHERS", "--reference", "SOME"], "30 images of the target are too few for a Frechet distance"),
        (["eval", "OTHERS", "--reference", "bundle"], "bundle is neither a folder, nor an npz or npy file"),
        (["eval", "OTHERS", "--reference", "SOME", "--metrics", "fid"], "there is no metric 'fid'"),
        (["eval", "OTHERS", "--reference", "RUN"], "is a run; name images"),
        (["eval", "OTHERS", "--reference", "SOME", "--network", "inception"], "--weights, or fetch it with --download"),
        (["eval", "OTHERS", "--reference", "OTHERS", "--floor", "OTHERS", "--metrics", "kid"], "not in the reference"),
        (["eval", "RUN", "--floor", "SOME", "--num-images", "32", "--metrics", "kid"], "has 30; name more"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(run, real, arguments, message, capsys):
    Path("OVER").mkdir()  # a run whose checkpoints are gone isn't a folder of images
    Path("OVER/config.json").write_text("{}")
    places = {"RUN": run, "SOME": real[0], "OTHERS": real[1]}
    assert call(*[places.get(argument, argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
