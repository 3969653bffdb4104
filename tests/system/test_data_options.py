"""What a config says of its source reaches the reader: a run over tar shards with a bad image in them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rowdit.commands import train as train_command
from rowdit.data import BadImageError, DataError

MODEL = {"image-size": 8, "patch-size": 4, "hidden-size": 16, "depth": 1, "num-heads": 2, "num-classes": 2}
TRAIN = {"steps": 3, "batch-size": 8, "micro-batch-size": None}


@pytest.fixture
def shard(tmp_path, monkeypatch) -> Path:
    """Sixteen noisy images in two classes; the fifth is damaged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    generator = np.random.default_rng(0)
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        for place in range(16):
            png = io.BytesIO()
            Image.fromarray(generator.integers(0, 256, (8, 8, 3), np.uint8)).save(png, "PNG")
            data = b"damaged" if place == 4 else png.getvalue()
            for name, content in ((f"{place:02d}.png", data), (f"{place:02d}.kind", b"1"), (f"{place:02d}.json", b"")):
                content = f'{{"kind": {place % 2}}}'.encode() if name.endswith("json") else content
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return tmp_path / "images.tar"


def run(shard: Path, *options: str) -> int:
    out = shard.parent / "run"
    source = ["--data.source", f"tar:{shard}", "--data.label-key", "kind", "--data.num-workers", "0"]
    small = [f"--model.{key}={value}" for key, value in MODEL.items()]
    small += [f"--train.{key}={value}" for key, value in TRAIN.items()]
    other = ["--out", str(out), "--fresh", "--no-evaluate", "--threads", "1"]
    return train_command.run(["folder", *other, *source, *small, *options])


def test_bad_images_end_a_run_are_left_out_or_replaced(shard, capsys):  # T18
    with pytest.raises(BadImageError, match="04.png"):
        run(shard)
    assert run(shard, "--data.bad-images", "replace") == 0
    shown = capsys.readouterr()
    assert "bad images met by this rank: 1, the first images.tar: 04.png" in shown.out + shown.err
    assert run(shard, "--data.bad-images", "skip") == 0


def test_labels_beyond_the_models_classes_are_refused_at_the_start(shard):  # T16
    with pytest.raises(DataError, match="01.png: label 1 .*; num_classes is 1, and 1 is the null class"):
        run(shard, "--model.num-classes", "1", "--data.bad-images", "replace")
