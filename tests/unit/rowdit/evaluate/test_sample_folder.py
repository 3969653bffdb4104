"""A folder of samples: the same bytes after a kill, a torn file or a full disk; other settings never mix."""

from __future__ import annotations

import errno
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from rowdit.evaluate import fingerprint
from rowdit.evaluate.ranks import Ranks
from rowdit.evaluate.sample_folder import (
    SampleFolder,
    SampleFolderError,
    SampleJob,
    fill,
    labels_at,
    write_folder_grid,
    write_npz,
)
from rowdit.evaluate.score import Sampling
from rowdit.models.dit import DiT, DiTConfig

NUM_CLASSES = 3


def make_model(channels: int = 1) -> DiT:
    """A DiT with weights that matter: at adaLN-zero's start every velocity would be zero."""
    config = DiTConfig(
        image_size=8, in_channels=channels, patch_size=2, hidden_size=32, depth=2, num_heads=2, num_classes=NUM_CLASSES
    )
    model = DiT(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def model() -> DiT:
    return make_model()


def make_job(model: nn.Module, *, batch_size: int = 4, labels: str = "balanced", **sampling) -> SampleJob:
    settings = {"sampler": "dpm", "num_steps": 3, "guidance": 2.0, "seed": 0} | sampling
    return SampleJob(
        model, {"sha256": "abc"}, Sampling(**settings), (1, 8, 8), NUM_CLASSES, labels=labels, batch_size=batch_size
    )


def bytes_of(folder: SampleFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.images.iterdir())}


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> dict[str, bytes]:
    """Fourteen images made in one go."""
    folder = SampleFolder(tmp_path_factory.mktemp("whole"))
    assert fill(folder, make_job(model), 14) == 14
    assert list(bytes_of(folder)) == [f"{i:08d}.png" for i in range(14)]
    return bytes_of(folder)


class Killed(BaseException):
    pass


class TestTheSameBytes:
    def test_fewer_then_more(self, model, tmp_path, whole):
        folder = SampleFolder(tmp_path)
        assert fill(folder, make_job(model), 5) == 5
        assert fill(folder, make_job(model), 14) == 9
        assert fill(folder, make_job(model), 14) == 0
        assert bytes_of(folder) == whole

    @pytest.mark.parametrize("world_size", [2, 3, 5])
    def test_any_number_of_ranks(self, model, tmp_path, whole, world_size):
        """Each rank's share, one after another: what a rank makes doesn't depend on the others."""
        folder = SampleFolder(tmp_path)

        class Alone(Ranks):
            def from_first(self, value):
                return ("", list(range(14)))

            def wait(self):
                pass

        for rank in range(world_size):
            fill(folder, make_job(model), 14, ranks=Alone(rank, world_size))
        assert bytes_of(folder) == whole

    def test_after_a_kill_in_the_middle(self, model, tmp_path, whole, monkeypatch):
        folder, calls = SampleFolder(tmp_path), []
        replace = fingerprint.os.replace

        def killed_at_the_seventh(source, goal):
            calls.append(goal)
            if len(calls) == 7:
                raise Killed
            replace(source, goal)

        with monkeypatch.context() as patch:
            patch.setattr(fingerprint.os, "replace", killed_at_the_seventh)
            # A real kill leaves the half-written file behind.
            patch.setattr(fingerprint.Path, "unlink", lambda self, missing_ok=False: None)
            with pytest.raises(Killed):
                fill(folder, make_job(model), 14)
        there = [path.name for path in folder.images.iterdir()]
        assert sum(name.endswith(".partial") for name in there) == 1
        assert len(folder.missing(14)) == 14 - 5  # the record was the first of the six
        assert fill(folder, make_job(model), 14) == 9
        assert bytes_of(folder) == whole, "and no leftover stays"

    def test_a_torn_file_is_not_counted(self, model, tmp_path, whole):
        """What a power cut leaves of files that were renamed but not yet on the disk."""
        folder = SampleFolder(tmp_path)
        fill(folder, make_job(model), 14)
        folder.file(3).write_bytes(whole["00000003.png"][:-5])
        folder.file(4).write_bytes(b"")
        folder.file(9).write_bytes(b"\0" * len(whole["00000009.png"]))
        assert folder.missing(14) == [3, 4, 9]
        assert fill(folder, make_job(model), 14) == 3
        assert bytes_of(folder) == whole

    def test_after_a_full_disk(self, model, tmp_path, whole, monkeypatch):
        folder, calls = SampleFolder(tmp_path), []
        replace = fingerprint.os.replace

        def full_at_the_ninth(source, goal):
            calls.append(goal)
            if len(calls) == 9:
                raise OSError(errno.ENOSPC, "No space left on device")
            replace(source, goal)

        with monkeypatch.context() as patch:
            patch.setattr(fingerprint.os, "replace", full_at_the_ninth)
            with pytest.raises(OSError, match=r"can't write .*00000007.png: No space left") as caught:
                fill(folder, make_job(model), 14)
        assert caught.value.errno == errno.ENOSPC
        assert len(list(folder.images.iterdir())) == 7, "nothing half-written"
        fill(folder, make_job(model), 14)
        assert bytes_of(folder) == whole

    def test_another_batch_size_changes_no_pixel_by_more_than_one_level(self, model, tmp_path, whole):
        other = SampleFolder(tmp_path)
        fill(other, make_job(model, batch_size=5), 14)
        for index in range(14):
            ours = np.asarray(Image.open(other.file(index))).astype(int)
            (tmp_path / "theirs.png").write_bytes(whole[f"{index:08d}.png"])
            theirs = np.asarray(Image.open(tmp_path / "theirs.png")).astype(int)
            assert abs(ours - theirs).max() <= 1


class TestWhatIsInTheFolder:
    def test_the_record(self, model, tmp_path):
        fill(SampleFolder(tmp_path), make_job(model), 2)
        record = json.loads((tmp_path / "sampling.json").read_text())
        assert record["format"] == "rowdit.samples/1"
        assert record["fingerprint"] == json.loads(json.dumps(make_job(model).fingerprint()))
        assert record["fingerprint"]["model"] == {"sha256": "abc"}
        assert record["fingerprint"]["sampling"]["labels"] == "balanced"

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"num_steps": 4}, "sampling.num_steps: 3 against 4"),
            ({"guidance_interval": (0.2, 0.8)}, r"sampling.guidance_interval: nothing against \[?\(?0.2, 0.8"),
            ({"labels": "random"}, "sampling.labels: balanced against random"),
            ({"batch_size": 8}, "batch_size: 4 against 8"),
            ({"seed": 1}, "sampling.seed: 0 against 1"),
        ],
    )
    def test_other_settings_are_refused(self, model, tmp_path, change, named):
        folder = SampleFolder(tmp_path)
        fill(folder, make_job(model), 2)
        before = bytes_of(folder)
        with pytest.raises(SampleFolderError, match=named):
            fill(folder, make_job(model, **change), 2)
        assert bytes_of(folder) == before
        folder.remove()
        assert list(tmp_path.iterdir()) == []
        fill(folder, make_job(model, **change), 2)

    def test_other_weights_are_refused(self, model, tmp_path):
        fill(SampleFolder(tmp_path), make_job(model), 2)
        job = SampleJob(model, {"sha256": "def"}, make_job(model).sampling, (1, 8, 8), NUM_CLASSES, batch_size=4)
        with pytest.raises(SampleFolderError, match="model.sha256: abc against def"):
            fill(SampleFolder(tmp_path), job, 2)

    def test_files_of_someone_else_are_refused(self, model, tmp_path):
        (tmp_path / "images").mkdir()
        (tmp_path / "images" / "holiday.png").write_bytes(b"mine")
        with pytest.raises(SampleFolderError, match=r"no .*sampling.json that says what they are"):
            fill(SampleFolder(tmp_path), make_job(model), 2)

    @pytest.mark.parametrize("content", ["{", '{"format": "rowdit.samples/99"}'])
    def test_a_record_that_is_none(self, model, tmp_path, content):
        (tmp_path / "sampling.json").write_text(content)
        with pytest.raises(SampleFolderError, match=r"sampling.json (isn't JSON|is of format 'rowdit.samples/99')"):
            fill(SampleFolder(tmp_path), make_job(model), 2)

    def test_npz_and_grid_hold_the_images(self, model, tmp_path):
        folder, job = SampleFolder(tmp_path), make_job(model, labels="2,0")
        fill(folder, job, 5)
        with np.load(write_npz(folder, job.fingerprint(), 5), allow_pickle=False) as content:
            images, labels = content["arr_0"], content["arr_1"]
        assert images.shape == (5, 8, 8, 1) and images.dtype == np.uint8
        assert labels.tolist() == [2, 0, 2, 0, 2]
        assert all(np.array_equal(images[i].transpose(2, 0, 1), folder.read(i)) for i in range(5))
        grid = np.asarray(Image.open(write_folder_grid(folder, 5, columns=3)))
        assert grid.shape == (16, 24)
        assert np.array_equal(grid[8:, 8:16], folder.read(4)[0]) and not grid[8:, 16:].any()
        assert not list(tmp_path.glob(".*"))


class TestLatents:
    def test_a_decoder_makes_the_images(self, tmp_path):
        class Decoder:
            def decode(self, latents):
                assert latents.dtype == torch.float32 and latents.shape[1:] == (4, 8, 8)
                images = nn.functional.interpolate(latents[:, :3], scale_factor=2.0)
                return ((images + 1) * 127.5).clamp(0, 255).round().to(torch.uint8)

            def describe(self):
                return {"name": "toy", "hash": "0", "spec": "vae:/somewhere"}

        folder, sampling = SampleFolder(tmp_path), Sampling("euler", 2, 1.0, 0)
        job = SampleJob(make_model(4), {}, sampling, (4, 8, 8), NUM_CLASSES, batch_size=2, decoder=Decoder())
        assert job.fingerprint()["decoder"] == {"name": "toy", "hash": "0"}, "where it lies is no part of what it is"
        fill(folder, job, 3)
        assert folder.read(2).shape == (3, 16, 16)

    def test_without_one_they_have_no_colours(self, tmp_path):
        job = SampleJob(make_model(4), {}, Sampling("euler", 2, 1.0, 0), (4, 8, 8), NUM_CLASSES)
        with pytest.raises(ValueError, match="4 channels has no colours: a model of latents needs a decoder"):
            fill(SampleFolder(tmp_path), job, 1)


class TestLabels:
    def test_rules(self):
        indices = torch.tensor([7, 2, 3])
        assert labels_at("balanced", indices, 3, 0).tolist() == [1, 2, 0]
        assert labels_at("null", indices, 3, 0).tolist() == [3, 3, 3]
        assert labels_at("1", indices, 3, 0).tolist() == [1, 1, 1]
        assert labels_at("0,2", indices, 3, 0).tolist() == [2, 0, 2]

    def test_random_ones_depend_on_seed_and_index_alone(self):
        many = labels_at("random", torch.arange(3000), 10, 5)
        assert torch.equal(labels_at("random", torch.tensor([17, 4]), 10, 5), many[[17, 4]])
        assert not torch.equal(labels_at("random", torch.arange(3000), 10, 6), many)
        counts = many.bincount(minlength=10)
        assert len(counts) == 10 and (counts - 300).abs().max() < 5 * 300**0.5

    @pytest.mark.parametrize("rule", ["balance", "", "1,", "0;1", "-1", "3", "0,3"])
    def test_others_are_refused(self, rule):
        with pytest.raises(ValueError, match="labels "):
            labels_at(rule, torch.arange(2), 3, 0)


def test_lower_precision_is_another_job(model, tmp_path):
    fast = make_job(model, precision="bfloat16")
    exact = make_job(model)
    assert fast.fingerprint() != exact.fingerprint()
    difference = (fast.batch(0).int() - exact.batch(0).int()).abs()
    assert 0 < int(difference.max()) < 64
    with pytest.raises(ValueError, match="precision is 'float16'"):
        make_job(model, precision="float16").batch(0)
