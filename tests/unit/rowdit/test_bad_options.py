"""A number that a verb can't use ends in one line that names the option, its value and its range; nothing is written.

The kind of fault: an option whose range only some verbs, or only the depths of the data part, looked at. So the same
values go through every verb that reads images.
"""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
from PIL import Image

from rowdit import cli

VERBS = {
    "check": ("data", "check", "{source}", "--image-size", "8"),
    "encode": ("encode", "{source}", "--image-size", "8", "--out", "{out}"),
    "train-vae": ("train-vae", "{source}", "--image-size", "8", "--out", "{out}"),
}
OUT_OF_RANGE = [
    *[(verb, option, value) for verb in VERBS for option in ("image-size", "channels") for value in ("0", "-1")],
    *[(verb, "channels", "2") for verb in VERBS],
    *[(verb, "num-classes", value) for verb in ("check", "encode") for value in ("0", "-1")],
    *[(verb, "num-workers", "-1") for verb in ("check", "encode")],
]


@pytest.fixture
def folder(tmp_path):
    """Two classes of two images."""
    generator = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in "ab":
            (tmp_path / "images" / part / name).mkdir(parents=True)
            pixels = generator.integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / part / name / "0.png")
    return tmp_path / "images"


def refused(folder, capsys, verb: str, *options: str) -> str:
    """The error line of a call that must fail."""
    out = folder.parent / "out"
    arguments = [part.format(source=f"folder:{folder}", out=out) for part in VERBS[verb]]
    assert cli.main([*arguments, *options]) == 2
    assert not out.exists()
    line = capsys.readouterr().err.strip()
    assert line.count("\n") == 0 and line.startswith("rowdit: ")
    return line


@pytest.mark.parametrize(("verb", "option", "value"), OUT_OF_RANGE)
def test_numbers_out_of_range_are_one_line(folder, capsys, verb, option, value):
    line = refused(folder, capsys, verb, f"--{option}", value)
    assert re.search(rf"\b{option.replace('-', '_')}( | = ){value}:? must be ", line)


@pytest.mark.parametrize("verb", ["check", "encode"])
def test_classes_that_the_folder_contradicts_are_refused(folder, capsys, verb):
    line = refused(folder, capsys, verb, "--num-classes", "3")
    assert "has 2 classes, not 3; leave num_classes out" in line


def test_more_ranks_than_can_be_counted_are_refused(capsys):
    assert cli.main(["plan", "quickstart", "--world-size", "1000000007"]) == 2
    assert "world_size = 1000000007: every rank is counted" in capsys.readouterr().err


def test_telling_a_mistake_imports_no_other_part_of_the_system(folder, capsys, monkeypatch):
    """A part that can't be imported once hid every message behind its own traceback."""
    for name in [name for name in sys.modules if name.startswith("rowdit.study")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rowdit.study.report", None)  # importing it fails
    assert "must be" in refused(folder, capsys, "encode", "--image-size", "0")


def test_the_errors_for_the_user_are_where_the_table_says():
    import importlib

    for module, name in cli.USER_ERRORS:
        error = getattr(importlib.import_module(module), name)
        assert error.__module__ == module and issubclass(error, Exception)


@pytest.mark.parametrize("verb", ["sample", "export"])
def test_a_run_that_is_none_is_told_from_one_without_checkpoints(tmp_path, capsys, verb):
    (tmp_path / "file").write_text("text")
    for place, reason in (("nowhere", "doesn't exist"), (".", "has no complete checkpoint")):
        assert cli.main([verb, str(tmp_path / place)]) == 2
        assert f"{reason}; name the folder that rowdit train wrote (its --out)\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "way_out"),
    [
        (("--optimizer.lr", "0.5"), "give --allow-changes to go on with it, another --out, or --fresh"),
        (("--model.depth", "2"), "give another --out, or --fresh"),
    ],
)
def test_a_folder_of_another_run_is_refused_with_the_ways_out(folder, capsys, change, way_out):
    """Those that work: changes that the state doesn't fit can't be allowed."""
    from rowdit.commands.train import parse
    from rowdit.train.config import to_dict

    model = {"image-size": 8, "patch-size": 4, "hidden-size": 8, "depth": 1, "num-heads": 1, "num-classes": 2}
    small = [f"--model.{key}={value}" for key, value in model.items()] + ["--data.source", f"folder:{folder}"]
    out = folder.parent / "run"
    out.mkdir()
    (out / "config.json").write_text(json.dumps(to_dict(parse(["folder", *small])[1])))
    arguments = ["train", "folder", *small, "--out", str(out), "--no-evaluate", "--threads", "1"]
    assert cli.main([*arguments, *change]) == 2
    assert way_out in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("text", ["[]", "[1]", "3", "{}", "[", '{"like": "h100", "between": 3}'])
def test_a_cluster_that_is_none_is_one_line(tmp_path, capsys, text):
    (tmp_path / "cluster.json").write_text(text)
    assert cli.main(["plan", "--cluster", str(tmp_path / "cluster.json")]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith(f"rowdit: {tmp_path / 'cluster.json'}") and line.count("\n") == 0


@pytest.mark.parametrize("option", ["--reference", "--floor", "--decoder"])
def test_an_empty_name_is_not_taken_for_none(tmp_path, capsys, option):
    assert cli.main(["eval", str(tmp_path), option, ""]) == 2
    assert f"{option} is empty: name something, or leave {option} out" in capsys.readouterr().err
