"""What no machine could do is refused in one line, before anything is allocated or started.

The kind of fault: a number too large by far, of anything that takes memory, processes or time for each.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rowdit import cli
from rowdit.commands import limits

HUGE = str(10**9)
TRAIN = ("train", "--out", "{out}", "--no-evaluate")
ENCODE = ("encode", "bundled", "--out", "{out}")
TOO_MUCH = [
    (TRAIN, "--train.batch-size", HUGE, "train.batch_size 1000000000 at image_size"),
    (TRAIN, "--train.batch-size", str(10**15), "train.batch_size 1000000000000000"),
    (TRAIN, "--train.steps", str(10**18), "steps = 1000000000000000000: must be fewer"),
    (TRAIN, "--model.image-size", str(2**30), "at image_size 1073741824"),
    (TRAIN, "--model.in-channels", HUGE, "of memory"),
    (TRAIN, "--model.hidden-size", str(12 * 10**8), "of memory"),
    (TRAIN, "--model.depth", HUGE, "depth is 1000000000; it must be at most"),
    (TRAIN, "--model.num-classes", str(10**12), "a model of hidden_size"),
    (TRAIN, "--model.mlp-ratio", "1e12", "a model of hidden_size"),
    (TRAIN, "--evaluate.num-samples", str(10**12), "evaluate.num_samples 1000000000000"),
    (TRAIN, "--evaluate.num-evaluations", HUGE, "num_evaluations = 1000000000: must be an"),
    (TRAIN, "--evaluate.num-steps", HUGE, "num_steps = 1000000000: must be"),
    (TRAIN, "--data.num-workers", HUGE, "data.num_workers = 1000000000: must be <= "),
    (TRAIN, "--threads", HUGE, "threads = 1000000000: must be <= "),
    (("compare", "--out", "{out}"), "--data.num-workers", HUGE, "num_workers = 1000000000: must be <= "),
    (("compare", "--out", "{out}"), "--train.batch-size", HUGE, "batch_size 1000000000"),
    (("tune", "--lr", "1e-3", "--out", "{out}"), "--processes", HUGE, "processes = 1000000000: must be <= "),
    (("tune", "--lr", "1e-3", "--out", "{out}"), "--model.hidden-size", str(12 * 10**8), "of memory"),
    (("study", "small", "--out", "{out}"), "--processes", HUGE, "processes = 1000000000: must be <= "),
    (("data", "check", "bundled"), "--image-size", str(2**24), "at image_size 16777216"),
    (("data", "check", "bundled"), "--num-workers", HUGE, "num_workers = 1000000000: must be <= "),
    (ENCODE, "--processes", HUGE, "processes = 1000000000: must be <= "),
    (ENCODE, "--num-workers", HUGE, "num_workers = 1000000000: must be <= "),
    (ENCODE, "--image-size", str(2**24), "at image_size 16777216"),
    (("train-vae", "bundled", "--out", "{out}"), "--batch-size", str(10**12), "batch_size 1000000000000"),
    (("train-vae", "bundled", "--out", "{out}"), "--image-size", str(2**24), "at image_size 16777216"),
    (("sample", "{out}"), "--num-images", str(10**12), "num_images = 1000000000000: must be an integer <= "),
    (("sample", "{out}"), "--batch-size", str(10**12), "batch_size = 1000000000000: must be an integer <= "),
    (("sample", "{out}"), "--num-steps", HUGE, "num_steps = 1000000000: must be an integer <= "),
    (("sample", "{out}"), "--columns", HUGE, "columns = 1000000000: must be an integer <= "),
    (("eval", "{out}"), "--num-images", str(10**12), "num_images = 1000000000000: must be an integer <= "),
    (("eval", "{out}"), "--image-size", str(2**30), "at image_size 1073741824"),
    (("plan",), "--model.hidden-size", str(12 * 10**8), "has more bytes than can be counted"),
    (("plan",), "--train.batch-size", str(10**15), "has more bytes than can be counted"),
    (("plan",), "--model.depth", HUGE, "depth is 1000000000; it must be at most"),
    (("sample", "{out}"), "--seed", "-1", "seed = -1: must be an integer >= 0"),
    (("bench",), "--depth", HUGE, "at --depth 1000000000 takes at least"),
    (("bench",), "--sizes", HUGE, "--sizes 1000000000 at --depth 2 takes at least"),
    (("bench",), "--ranks", HUGE, "--ranks = 1000000000: must be <= "),
]


@pytest.mark.parametrize(("verb", "option", "value", "message"), TOO_MUCH, ids=lambda part: str(part)[:40])
def test_what_is_absurd_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    verb: tuple[str, ...],
    option: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setattr(limits, "memory_bytes", lambda: 64 * 10**9)  # the same on a machine that has terabytes
    arguments = [part.format(out=tmp_path / "out") for part in verb]
    try:
        assert cli.main([*arguments, option, value]) == 2
        line = capsys.readouterr().err.strip()
        assert line.count("\n") == 0 and line.startswith("rowdit: ") and message in line
    except SystemExit as refused:  # by the parser, which frames what a config says
        assert refused.code == 2 and message in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_every_recipe_is_far_from_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the smallest machine that each is for: its own number of ranks, one GPU's 80 GB for each."""
    from rowdit import recipes
    from rowdit.study.comparison import Comparison

    monkeypatch.setattr(limits, "memory_bytes", lambda: 80 * 10**9)
    for name in recipes.RECIPES:
        if name == "imagenet256":
            continue
        recipe = recipes.load(name)
        if isinstance(recipe, Comparison):
            recipe = recipe.run_config(recipe.select(None)[-1], 0)
        limits.check_run(recipe, 256 if name.startswith("scale") else 1)


def test_memory_is_this_machines_or_its_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = limits.memory_bytes()
    assert whole is not None and whole > 2**30
    (tmp_path / "max").write_text("1000000\n")
    monkeypatch.setattr(limits, "CGROUP", tmp_path / "max")
    assert limits.memory_bytes() == 1_000_000
    (tmp_path / "max").write_text("max\n")
    assert limits.memory_bytes() == whole


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 3.64 TiB for an array"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
    ids=["numpy", "torch"],
)
def test_an_allocators_message_is_one_line_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def allocate(*_: object) -> None:
        raise error

    monkeypatch.setattr("rowdit.commands.report.run", allocate)
    assert cli.main(["report", "x"]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("rowdit: out of memory (") and "take smaller images" in line and line.count("\n") == 0


def test_an_empty_list_is_refused_by_its_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, option in (
        (("tune", "--lr", ""), "--lr"),
        (("tune", "--lr", "1e-3,,2e-3"), "--lr"),
        (("tune", "--optimizer", "periodic", "--row-scale", " "), "--row-scale"),
        (("tune", "--lr", "1e-3", "--seeds", ""), "--seeds"),
        (("compare", "--optimizers", ""), "--optimizers"),
        (("study", "small", "--cases", ""), "--cases"),
        (("study", "small", "--questions", ","), "--questions"),
    ):
        assert cli.main([*arguments, "--out", str(tmp_path / "out")]) == 2
        line = capsys.readouterr().err.strip()
        assert line.startswith(f"rowdit: {option} ") and "give at least one, comma-separated" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["encode", "train-vae"])
def test_a_device_that_is_none_is_refused_whatever_is_done_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """The identity encoder computes nothing, and so never looked."""
    arguments = [verb, "bundled", "--out", str(tmp_path / "out"), "--device", "banana"]
    assert cli.main(arguments) == 2
    assert "--device banana: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_takes_no_changes_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rowdit.commands.train import parse
    from rowdit.train.config import to_dict

    out = tmp_path / "run"
    out.mkdir()
    (out / "config.json").write_text(json.dumps(to_dict(parse(["quickstart"])[1])))
    (out / "finished.json").write_text(json.dumps({"step": 10**6, "diverged": ""}))
    arguments = ["train", "--no-evaluate", "--out", str(out)]
    assert cli.main(arguments) == 0
    assert "last     step 1000000 (finished before; nothing was trained)" in capsys.readouterr().out
    assert (
        cli.main([*arguments, "--allow-changes", "--data.num-workers", "1"]) == 0
    )  # changes nothing of what is trained
    assert "nothing was trained" in capsys.readouterr().out
    for changed in (("--optimizer.lr", "0.5"), ("--train.steps", "5")):
        assert cli.main([*arguments, "--allow-changes", *changed]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert "ended at step 1000000, so this would change nothing" in line and "--train.steps more than" in line
