"""Where a verb can't write is told before any work is done, in the same words for all verbs; nothing is left behind.

The kinds of fault: a path that is the wrong kind of thing, that leads through a file, that nobody can make; a folder
that a refused call made; a run that is deleted before it is known that another can take its place.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rowdit import cli
from rowdit.commands.outputs import check_file, check_folder, no_empty_folder
from rowdit.train.plain import ConfigError

FOLDERS = {
    "train": ("train", "--out"),
    "compare": ("compare", "--out"),
    "tune": ("tune", "--out"),
    "study": ("study", "small", "--out"),
    "sample": ("sample", "{run}", "--out"),
    "eval": ("eval", "{run}", "--out"),
    "eval cache": ("eval", "{run}", "--cache"),
    "export diffusers": ("export", "{run}", "--format", "diffusers", "--out"),
    "encode": ("encode", "bundled", "--out"),
    "train-vae": ("train-vae", "bundled", "--out"),
    "plan": ("plan", "--sweep", "--out"),
    "data get": ("data", "get", "fashion-mnist", "--folder"),
}
FILES = {
    "export": ("export", "{run}", "--out"),
    "export public": ("export", "{run}", "--format", "public", "--out"),
    "eval": ("eval", "{run}", "--save-statistics"),
}


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A place with a file, a folder and a link to nothing in it."""
    (tmp_path / "file").write_text("kept")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    return tmp_path


def refused(there: Path, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...], path: Path) -> str:
    """The one line of a call that must fail at once, with nothing changed."""
    before = sorted(there.rglob("*"))
    arguments = [part.format(run=there / "run") for part in verb]
    assert cli.main([*arguments, str(path)]) == 2
    assert sorted(there.rglob("*")) == before and (there / "file").read_text() == "kept"
    line = capsys.readouterr().err.strip()
    assert line.count("\n") == 0 and "Errno" not in line
    assert line.startswith(f"rowdit: {verb[-1]} ") and "name " in line
    return line


@pytest.mark.parametrize("verb", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_that_cannot_be_is_refused(
    there: Path, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
) -> None:
    for path, reason in (
        (there / "file", "is a file; name a folder"),
        (there / "file" / "in" / "it", f"{there / 'file'} is a file, so nothing can lie in it"),
        (there / "link", "is a link to what isn't there"),
        (there / ("n" * 300), "can't be a path here: File name too long"),
        (Path("/dev/null"), "is neither a file nor a folder"),
        (Path("/proc/rowdit"), "can't write into /proc"),
    ):
        assert reason in refused(there, capsys, verb, path)


@pytest.mark.parametrize("verb", FILES.values(), ids=FILES)
def test_a_file_that_cannot_be_is_refused(
    there: Path, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
) -> None:
    for path, reason in (
        (there / "run", f"is a folder; name a file, such as {there / 'run'}/"),
        (there / "file" / "a.safetensors", f"{there / 'file'} is a file, so nothing can lie in it"),
        (Path("/proc/a.safetensors"), "can't write into /proc"),
    ):
        assert reason in refused(there, capsys, verb, path)


def test_statistics_have_the_name_by_which_they_are_read(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(there, capsys, FILES["eval"], there / "a.bin")
    assert f"the name must end in .safetensors, such as {there / 'a.safetensors'}" in line


def test_a_device_is_no_file(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To be replaced, as everything is that is written whole or not at all."""
    assert "is neither a file nor a folder" in refused(there, capsys, FILES["export"], Path("/dev/null"))


def test_a_bench_file_that_cannot_be_is_refused(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (there / "run.md").mkdir()
    assert f"{there / 'run.md'} is a folder" in refused(there, capsys, ("bench", "--save"), there / "run")


def test_what_can_be_is_taken_and_not_made(there: Path) -> None:
    for path in (there / "run", there / "new", there / "new" / "deeper", None):
        check_folder(path)
    for path in (there / "file", there / "new", there / "new" / "deeper", None):
        check_file(path)
    assert not (there / "new").exists()


def test_a_place_without_permission_is_refused(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the system says: the tests may run as one who may do anything."""

    def denied(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("rowdit.commands.outputs.tempfile.TemporaryFile", denied)
    with pytest.raises(
        ConfigError, match=r"--out .*new: can't write into .* \(Permission denied\); name another folder"
    ):
        check_folder(there / "new")


def test_only_what_was_made_and_is_empty_is_taken_away(tmp_path: Path) -> None:
    def fail_in(folder: Path, *names: str) -> None:
        with pytest.raises(KeyError), no_empty_folder(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                (folder / name).touch()
            raise KeyError

    fail_in(tmp_path / "a" / "b", ".lock")
    assert not (tmp_path / "a").exists()
    fail_in(tmp_path / "a" / "b", ".lock", "other")
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == {".lock", "other"}
    (tmp_path / "old").mkdir()
    fail_in(tmp_path / "old", ".lock")
    assert (tmp_path / "old" / ".lock").exists()


REFUSED = {
    "no data": ("train", "folder", "--data.source", "folder:/nowhere"),
    "other classes": ("train", "--model.num-classes", "3"),
    "other channels": ("train", "--model.in-channels", "3"),
    "compare": ("compare", "--data.source", "folder:/nowhere"),
    "tune": ("tune", "--lr", "1e-3", "--data.source", "folder:/nowhere"),
    "encode": ("encode", "folder:/nowhere", "--image-size", "8"),
}


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED)
def test_a_refused_call_leaves_no_folder(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert cli.main([*arguments, "--out", str(tmp_path / "out" / "run")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_refused_fresh_start_deletes_nothing(tmp_path: Path) -> None:
    """The old run once went first, and then the new one's data weren't there."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "log.jsonl").touch()
    for wrong in (("--data.source", "folder:/nowhere"), ("--model.num-classes", "3")):
        assert cli.main(["train", "--fresh", *wrong, "--out", str(tmp_path / "run")]) == 2
        assert (tmp_path / "run" / "log.jsonl").exists() and (tmp_path / "run" / "checkpoints").exists()
