"""Latent shards: the same whoever writes them, whole or not counted, and read as they were written."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rowdit import streams
from rowdit.commands import encode as encode_command
from rowdit.data import ArrayDataset, DataError, Dataset, DrawnDataset, ImageFolder, Loader, batch_at, open_dataset
from rowdit.data.decode import BadImageError
from rowdit.data.latents import Latents
from rowdit.encode import EncodeOptions, IdentityEncoder, encode_split, job, verify
from rowdit.encode.train_vae import train_vae
from rowdit.models.vae import VAEConfig


class Toy:
    """Latents by arithmetic: every other pixel over 64, of deviation 1 or, if it is odd, 2. Mirroring matters."""

    name, hash, in_channels, downsample_factor, has_deviations = "toy", "0" * 64, 1, 2, True

    def encode(self, images):
        means = images[:, :, ::2, ::2].float() / 64
        return means, 1.0 + (images[:, :, ::2, ::2] % 2).float()

    def decode(self, latents):
        return (latents * 64).round().to(torch.uint8).repeat_interleave(2, -1).repeat_interleave(2, -2)

    def latent_shape(self, image_size):
        return 1, image_size // 2, image_size // 2

    def describe(self):
        return {"name": self.name, "spec": "toy", "hash": self.hash, "scale": 1.0, "shift": 0.0, "factor": 2}


def pixels(num_images: int = 23) -> ArrayDataset:
    images = np.random.default_rng(0).integers(0, 256, (num_images, 1, 4, 4), np.uint8)
    return ArrayDataset(images, np.arange(num_images) % 3, ("a", "b", "c"), name="pixels")


SMALL = EncodeOptions(shard_images=5, batch_size=3, dtype="float32")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def folder(tmp_path) -> Path:
    assert encode_split(pixels(), Toy(), tmp_path / "train", SMALL)
    return tmp_path / "train"


# ---------------------------------------------------------------------------------------------------- reading
def test_means_deviations_and_labels_come_back(folder):
    latents, source = Latents(folder), pixels()
    assert isinstance(latents, Dataset) and isinstance(latents, DrawnDataset)
    assert len(latents) == 23 and latents.image_shape == (1, 2, 2) and latents.class_names == ("a", "b", "c")
    order = np.array([22, 0, 7, 7, 13])
    images, labels = latents.fetch(order)
    assert images.dtype == np.float32 and labels.tolist() == source.labels[order].tolist()
    assert (images == source.images[order][:, :, ::2, ::2] / np.float32(64)).all()


def test_a_draw_is_mean_plus_deviation_times_noise_of_its_position(folder):
    latents, source = Latents(folder), pixels()
    batch = batch_at(latents, seed=4, images_seen=40, batch_size=12, flip=True)
    flipped = (streams.uniform(4, "flip", batch.positions) < 0.5).numpy()
    assert 0 < flipped.sum() < 12
    plain = batch_at(source, seed=4, images_seen=40, batch_size=12)  # the same samples, in bytes
    noise = streams.normal(4, "latent", batch.positions, (1, 2, 2))
    raw = ((plain.images + 1) * 127.5).round().to(torch.uint8)
    raw[flipped] = raw[flipped].flip(-1)
    means, deviations = Toy().encode(raw)
    assert torch.equal(batch.images, means + deviations * noise)
    assert torch.equal(batch.labels, plain.labels)


def test_the_same_sample_is_drawn_anew_in_each_epoch_and_alike_at_every_world_size(folder):
    latents = Latents(folder)
    first, second = (batch_at(latents, seed=4, images_seen=23 * epoch, batch_size=23) for epoch in (0, 1))
    assert sorted(first.labels.tolist()) == sorted(second.labels.tolist())
    assert not torch.equal(first.images.sort(dim=0).values, second.images.sort(dim=0).values)
    shares = [batch_at(latents, seed=4, images_seen=8, batch_size=12, rank=r, world_size=4) for r in range(4)]
    whole = batch_at(latents, seed=4, images_seen=8, batch_size=12)
    assert torch.equal(torch.cat([share.images for share in shares]), whole.images)


def test_workers_read_latents(folder):
    latents = Latents(folder)
    with Loader(latents, seed=1, images_seen=6, batch_size=6, num_workers=1) as loader:
        next(loader)
        expected = batch_at(latents, seed=1, images_seen=12, batch_size=6)
        assert torch.equal(next(loader).images, expected.images)


def test_identity_shards_are_bytes_and_flips_cost_no_space(tmp_path):
    source = pixels()
    encode_split(source, IdentityEncoder(1), tmp_path, EncodeOptions(shard_images=10))
    latents = Latents(tmp_path)
    assert latents.manifest["dtype"] == "uint8" and not latents.manifest["deviations"]
    for flip in (False, True):
        ours = batch_at(latents, seed=2, images_seen=3, batch_size=20, flip=flip)
        assert torch.equal(ours.images, batch_at(source, seed=2, images_seen=3, batch_size=20, flip=flip).images)


def test_half_precision_rounds_and_no_more(tmp_path):
    encode_split(pixels(), Toy(), tmp_path, EncodeOptions(dtype="float16", flips=False))
    latents = Latents(tmp_path)
    exact = pixels().images[:, :, ::2, ::2] / np.float32(64)
    assert np.abs(latents.fetch(np.arange(23))[0] - exact).max() <= 2.0**-10  # half a unit in the last place below 4
    with pytest.raises(DataError, match="no mirror images; encode without --no-flips"):
        batch_at(latents, seed=0, images_seen=0, batch_size=4, flip=True)


def test_the_fingerprint_follows_the_content_and_not_the_place(folder, tmp_path):
    encode_split(pixels(), Toy(), tmp_path / "again", SMALL)
    encode_split(pixels(22), Toy(), tmp_path / "fewer", SMALL)
    mark = Latents(folder).fingerprint
    assert mark.startswith("latents-toy-0000") and ":23x1x2x2:4px-native:sha256-" in mark
    assert Latents(tmp_path / "again").fingerprint == mark != Latents(tmp_path / "fewer").fingerprint


# ---------------------------------------------------------------------------------------------------- writing
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_any_number_of_ranks_writes_the_same_files(folder, tmp_path, world_size):
    whole = [
        encode_split(pixels(), Toy(), tmp_path / "out", SMALL, rank=rank, world_size=world_size)
        for rank in reversed(range(world_size))
    ]
    assert whole == [False] * (whole.count(False)) + [True] * whole.count(True) and whole[-1]
    assert contents(tmp_path / "out") == contents(folder)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_decode_ahead_and_change_nothing(folder, tmp_path, num_workers):
    shown = []
    options = dataclasses.replace(SMALL, num_workers=num_workers)
    assert encode_split(pixels(), Toy(), tmp_path / "out", options, on_progress=lambda *now: shown.append(now))
    assert contents(tmp_path / "out") == contents(folder)
    assert shown[0] == (0, 23) and shown[-1] == (23, 23) and len(shown) == 10  # the start, and each batch


def test_a_restart_makes_only_what_is_missing(folder, monkeypatch):
    expected = contents(folder)
    (folder / "manifest.json").unlink()
    (folder / "shard-00001.json").unlink()  # killed between the file and its description
    (folder / "shard-00003.safetensors").write_bytes(b"cut off")  # a copy that broke off
    (folder / "shard-00004.safetensors.part-123").write_bytes(b"")  # killed while writing
    with pytest.raises(DataError, match="isn't finished: run the same `rowdit encode` again"):
        Latents(folder)
    made = []
    monkeypatch.setattr(job, "write_shard", lambda *a, write=job.write_shard: (made.append(a[1]), write(*a)))
    assert encode_split(pixels(), Toy(), folder, SMALL)
    assert made == [1, 3]
    (folder / "shard-00004.safetensors.part-123").unlink()
    assert contents(folder) == expected


def test_a_killed_process_is_taken_up_where_it_was(tmp_path):
    """kill -9 in the middle; whatever stood then, the second run completes it to the same files."""

    class Slow(Toy):
        def encode(self, images):
            time.sleep(0.02)
            return super().encode(images)

    arguments = (pixels(), Slow(), tmp_path / "out", SMALL)
    process = multiprocessing.get_context("fork").Process(target=encode_split, args=arguments)
    process.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "out" / "shard-00001.json").exists():
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.join()
    assert not (tmp_path / "out" / "manifest.json").exists()
    encode_split(pixels(), Toy(), tmp_path / "out", SMALL)
    encode_split(pixels(), Toy(), tmp_path / "expected", SMALL)
    ours = {name: data for name, data in contents(tmp_path / "out").items() if ".part-" not in name}
    assert ours == contents(tmp_path / "expected")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": pixels(22)}, "source: .*23.* there, .*22"),
        ({"options": EncodeOptions(shard_images=6, dtype="float32")}, "shard_images: 5 there, 6 now"),
        ({"options": EncodeOptions(shard_images=5)}, "dtype: 'float32' there, 'float16' now"),
        ({"encoder": IdentityEncoder(1)}, "encoder: "),
    ],
)
def test_another_job_into_the_same_folder_is_refused(folder, changes, message):
    before = contents(folder)
    arguments = {"dataset": pixels(), "encoder": Toy(), "folder": folder, "options": SMALL, **changes}
    with pytest.raises(DataError, match=f"holds another encoding .*{message}"):
        encode_split(**arguments)
    assert contents(folder) == before


def test_a_file_system_without_links_will_do(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("no links here")

    monkeypatch.setattr(job.os, "link", refuse)
    assert encode_split(pixels(), Toy(), tmp_path / "out", SMALL)
    assert len(Latents(tmp_path / "out")) == 23


def test_damage_is_found_and_mended_by_the_same_command(folder):
    shard = folder / "shard-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match="shard-00002.safetensors is damaged: its sha256"):
        Latents(folder)
    Latents(folder, check_hashes=False)  # sizes alone are right
    with pytest.raises(DataError, match="shard-00002"):
        verify(folder)
    encode_split(pixels(), Toy(), folder, SMALL)
    assert len(verify(folder)["shards"]) == 5


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / "shard-00000.safetensors").unlink(), "shard-00000.safetensors is missing; encode"),
        (lambda f: (f / "shard-00000.safetensors").write_bytes(b"x"), "has 1 bytes, not"),
        (lambda f: (f / "manifest.json").write_text("{"), "isn't JSON"),
        (lambda f: (f / "manifest.json").write_text('{"format": "other/2"}'), "format 'other/2'; this version reads"),
        (lambda f: [p.unlink() for p in f.iterdir()], "doesn't exist; no latents lie there"),
    ],
)
def test_what_isnt_whole_is_named(folder, harm, message):
    harm(folder)
    with pytest.raises(DataError, match=message):
        Latents(folder)


def test_a_file_that_is_no_safetensors_is_refused(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    size = manifest["shards"][0]["num_bytes"]
    (folder / "shard-00000.safetensors").write_bytes(b"\xff" * size)
    with pytest.raises(DataError, match="isn't a shard of latents"):
        Latents(folder, check_hashes=False)


def test_images_that_dont_fit_the_encoder(tmp_path):
    with pytest.raises(DataError, match="have 1 channel.* takes 3"):
        encode_split(pixels(), IdentityEncoder(3), tmp_path)
    odd = ArrayDataset(np.zeros((2, 1, 5, 5), np.uint8), np.zeros(2, np.int64), ("a",), name="odd")
    with pytest.raises(DataError, match="image_size 5 isn't divisible"):
        encode_split(odd, Toy(), tmp_path)


def test_latents_are_not_encoded_again(folder, tmp_path):
    with pytest.raises(DataError, match="are latents already"):
        encode_split(Latents(folder), IdentityEncoder(1), tmp_path / "again")
    with pytest.raises(DataError, match="are latents; an autoencoder is trained on images"):
        train_vae(Latents(folder), tmp_path / "vae", VAEConfig())


def test_an_encoder_that_overflows_is_named(tmp_path):
    class Infinite(Toy):
        def encode(self, images):
            means, deviations = super().encode(images)
            means[1] = float("inf")
            return means, deviations

    with pytest.raises(DataError, match="mean of image 1 isn't finite as torch.float32"):
        encode_split(pixels(), Infinite(), tmp_path, SMALL)


# ---------------------------------------------------------------------------------------------------- bad images
@pytest.fixture
def damaged(tmp_path) -> Path:
    """Two classes of six; cat/1 and dog/4 are damaged. Image i of a class is grey 20 i."""
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for i in range(6):
            Image.new("L", (4, 4), 20 * i).save(tmp_path / "pets" / name / f"{i}.png")
    (tmp_path / "pets" / "cat" / "1.png").write_bytes(b"x")
    (tmp_path / "pets" / "dog" / "4.png").write_bytes(b"x")
    return tmp_path / "pets"


def test_bad_images_end_the_job_or_are_left_out_and_listed(damaged, tmp_path):  # T18
    with pytest.raises(BadImageError, match="cat/1.png"):
        encode_split(ImageFolder(damaged, 4, channels=1), Toy(), tmp_path / "a", SMALL)
    options = EncodeOptions(shard_images=3, batch_size=2, skip_bad=True)
    for rank, num_workers in ((1, 0), (0, 1)):
        some = dataclasses.replace(options, num_workers=num_workers)
        encode_split(ImageFolder(damaged, 4, channels=1), Toy(), tmp_path / "b", some, rank=rank, world_size=2)
    latents = Latents(tmp_path / "b")
    assert len(latents) == 10 and latents.manifest["class_counts"] == [5, 5]
    assert sorted(latents.manifest["bad_files"]) == sorted(latents.bad_files) == ["cat/1.png", "dog/4.png"]
    assert latents.labels.tolist() == [0] * 5 + [1] * 5
    assert latents.fetch(np.arange(10))[0][:, 0, 0, 0].tolist() == [
        v / 64 for v in (0, 40, 60, 80, 100, 0, 20, 40, 60, 100)
    ]


def test_replaced_images_are_counted(damaged, tmp_path):
    source = ImageFolder(damaged, 4, channels=1, bad_images="replace")
    encode_split(source, Toy(), tmp_path / "out", SMALL)
    manifest = Latents(tmp_path / "out").manifest
    assert manifest["num_images"] == 12 and manifest["num_replaced"] == 2
    assert list(manifest["bad_files"]) == ["cat/1.png", "dog/4.png"]


def test_a_shard_of_bad_images_alone_is_empty(damaged, tmp_path):
    options = EncodeOptions(shard_images=1, skip_bad=True, flips=False)
    encode_split(ImageFolder(damaged, 4, channels=1), Toy(), tmp_path / "out", options)
    latents = Latents(tmp_path / "out")
    assert len(latents) == 10 and len(latents.manifest["shards"]) == 12
    assert latents.fetch(np.array([1]))[0][0, 0, 0, 0] == 40 / 64


# ---------------------------------------------------------------------------------------------------- the verb
def test_the_verb_writes_both_splits_in_processes_and_verifies(tmp_path, capsys):
    out = tmp_path / "out"
    for folder in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / "images" / folder / name).mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (6, 9), (40 * i, 0, 0)).save(tmp_path / "images" / folder / name / f"{i}.png")
    arguments = [f"folder:{tmp_path / 'images'}", "--out", str(out), "--image-size", "4", "--shard-images", "3"]
    assert encode_command.run([*arguments, "--processes", "2"]) == 0
    assert "8 latents of 3x4x4 in 3 shards" in capsys.readouterr().out
    assert encode_command.run([*arguments, "--verify"]) == 0
    assert capsys.readouterr().out.count("3 shards are as the manifest says") == 2
    train = open_dataset(f"latents:{out}", "train", 4)
    pictures = open_dataset(f"folder:{tmp_path / 'images'}", "train", 4)
    ours, theirs = (batch_at(d, seed=0, images_seen=0, batch_size=8).images for d in (train, pictures))
    assert torch.equal(ours, theirs)
    with pytest.raises(DataError, match="latents are 4 a side, not 8; set the model's image_size"):
        open_dataset(f"latents:{out}", "train", 8)


def test_ranks_of_torchrun_share_the_work(tmp_path, monkeypatch, capsys):
    arguments = [
        "bundled",
        "--out",
        str(tmp_path),
        "--image-size",
        "4",
        "--split",
        "reference",
        "--shard-images",
        "900",
    ]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    encode_command.run(arguments)
    shown = capsys.readouterr()
    assert "the manifest comes with the last rank's" in shown.out and not shown.err  # one rank tells how far it is
    monkeypatch.setenv("RANK", "0")
    encode_command.run(arguments)
    shown = capsys.readouterr()
    assert "2000 latents of 1x4x4 in 3 shards" in shown.out
    assert shown.err.splitlines()[-1] == "encode reference: 1100 of 1100 images" and len(shown.err.splitlines()) == 10
    with pytest.raises(DataError, match="no split 'train', only reference"):
        open_dataset(f"latents:{tmp_path}", "train")
