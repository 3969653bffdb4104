"""The whole life of a run, by the commands that a user types, under the real torchrun: a folder of images is encoded,
two ranks train on it, one is killed with SIGKILL in the middle of a save, one process goes on, samples are made and
scored, the model is exported and loaded elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rowdit.train import checkpoint
from rowdit.train.log import read_jsonl

SETTINGS = {
    "model": {"image-size": 8, "in-channels": 3, "patch-size": 2, "hidden-size": 16, "depth": 2, "num-heads": 2},
    "train": {"batch-size": 8, "micro-batch-size": 2, "steps": 9, "warmup-steps": 2, "checkpoint-every": 3},
    "evaluate": {"num-evaluations": 1, "num-samples": 6, "num-val-images": 6, "num-steps": 2, "grid-images": 6},
    "data": {"num-workers": 0},
}
FLAGS = [word for part, fields in SETTINGS.items() for key, v in fields.items() for word in (f"--{part}.{key}", str(v))]
FLAGS += ["--model.num-classes", "3", "--train.async-checkpoints"]
SPREAD = ["--parallel.activation-checkpointing", "--parallel.accumulate-unsharded"]

# Stands for a machine that loses power: rank 1 has written its part of the third checkpoint, and then is no more.
KILLED_WHILE_SAVING = """
import os, signal, sys
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from rowdit.cli import main

write, saves = FileSystemWriter.write_data, []

def write_and_die(self, *args):
    saves.append(self.path)
    done = write(self, *args)
    if len(saves) == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return done

FileSystemWriter.write_data = write_and_die
sys.exit(main(sys.argv[1:]))
"""

LOADED_ELSEWHERE = """
import sys, torch
from rowdit.train.export import load_export
model = load_export(sys.argv[1]).requires_grad_(False)
x = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
print(float(model(x, torch.tensor([0.2, 0.7]), torch.tensor([0, 3])).double().square().sum()))
"""


def run(*command: str, cwd: Path, expect: int | None = 0) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    done = subprocess.run([sys.executable, "-m", *command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert expect is None or done.returncode == expect, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of six 10 x 10 images; one of them grey, one with transparency."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for split, num in (("train", 6), ("reference", 2)):
        for label in range(3):
            (folder / split / f"class{label}").mkdir(parents=True)
            for i in range(num):
                pixels = generator.integers(0, 80, (10, 10, 3), dtype=np.uint8) + np.uint8(60 * label)
                mode = {0: "L", 1: "RGBA"}.get(i, "RGB") if label == 0 else "RGB"
                Image.fromarray(pixels).convert(mode).save(folder / split / f"class{label}" / f"{i}.png")
    return folder


@pytest.mark.timeout(600)
def test_the_whole_life_of_a_run(images: Path, tmp_path: Path) -> None:
    run("rowdit", "encode", f"folder:{images}", "--out", "latents", "--image-size", "8", cwd=tmp_path)
    train = ["train", "folder", "--data.source", "latents:latents", "--out", "run", *FLAGS]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = tmp_path / "killed.py"
    script.write_text(KILLED_WHILE_SAVING)

    output = run(*torchrun, str(script), *train, *SPREAD, cwd=tmp_path, expect=None)
    assert "SIGKILL" in output or "-9" in output
    folder = tmp_path / "run"
    found = checkpoint.newest(folder / "checkpoints")
    assert found is not None and found.step == 3
    assert [path.name for path in (folder / "checkpoints").glob(".writing*")] == [".writing-step-0000006"]
    before = [row["loss"] for row in read_jsonl(folder / "log.jsonl")][:3]

    output = run("rowdit", *train, cwd=tmp_path)
    assert "resuming at step 3" in output and "changed: parallel.activation_checkpointing: true -> false" in output
    rows = read_jsonl(folder / "log.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 10)) and [row["loss"] for row in rows][:3] == before
    assert [row["kind"] for row in rows] == ["refresh", "row", "row"] * 3
    assert (folder / "finished.json").exists() and not list((folder / "checkpoints").glob(".writing*"))
    evaluations = read_jsonl(folder / "evaluations.jsonl")
    assert [row["step"] for row in evaluations] == [0, 9]
    assert all((folder / row["grid"]).is_file() and row["val_loss"] > 0 for row in evaluations)
    assert all(row["score_report"] > 0 for row in evaluations)  # of decoded latents against decoded latents

    run("rowdit", *train[:4], "--out", "alone", *FLAGS, cwd=tmp_path)  # on one process, never stopped
    alone = [row["loss"] for row in read_jsonl(tmp_path / "alone" / "log.jsonl")]
    # Newton-Schulz is in bf16, whose roundings a sum in another order can flip; the losses are of order 1.
    np.testing.assert_allclose([row["loss"] for row in rows], alone, rtol=1e-3)

    run("rowdit", "sample", "run", "--num-images", "3", "--out", "made", cwd=tmp_path)
    assert len(list((tmp_path / "made" / "images").glob("*.png"))) == 3
    judge = ["--reference", f"folder:{images}", "--image-size", "8", "--cache", "cache", "--num-images", "6"]
    run("rowdit", "eval", "run", "--metrics", "kid", *judge, cwd=tmp_path)
    (scores,) = (folder / "evaluation").glob("ema-0000009-*/scores.json")
    assert "kid_effnet_lite0" in scores.read_text()

    run("rowdit", "export", "run", "--out", "elsewhere/model.safetensors", cwd=tmp_path)
    (tmp_path / "elsewhere" / "load.py").write_text(LOADED_ELSEWHERE)
    printed = run("load", "model.safetensors", cwd=tmp_path / "elsewhere")
    assert float(printed) == pytest.approx(_answer(folder), rel=1e-6)
    header = json.loads((folder / "config.json").read_text())
    assert header["train"]["batch_size"] == 8


def _answer(folder: Path) -> float:
    import torch

    model = checkpoint.load_model(folder)
    x = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
    with torch.no_grad():
        return float(model(x, torch.tensor([0.2, 0.7]), torch.tensor([0, 3])).double().square().sum())
