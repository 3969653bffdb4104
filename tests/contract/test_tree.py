"""The tree as a whole: sizes of files, what a file must not name, versions that must agree, what the wheel holds."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 400

# Written in pieces, so that this file doesn't name them itself.
FORBIDDEN = {
    "a person's or a machine's folder": r"(?<![\w.])/(home|Users|root|work)/(?!\.\.\.)\w|\b[A-Z]:\\\\?Users\b",
    "a package registry's host": r"\b(pypi|pythonhosted|npmjs|debian|ubuntu|anaconda)" + r"\.(org|com)\b",
    "a package index's address": r"download" + r"\.pytorch\.org",
}


def tracked_files() -> list[Path]:
    """What git knows or would take up; in an unpacked archive, every file outside of the caches."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True) if shutil.which("git") else None
    if listed is not None and listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:
        hidden = (".venv", ".git", "build", "dist", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache")
        paths = [path for path in ROOT.rglob("*") if not set(path.relative_to(ROOT).parts) & set(hidden)]
    return [path for path in sorted(paths) if path.is_file()]


def forbidden_in(text: str) -> list[str]:
    return [
        f"{number}: {what}: {match.group(0)}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FORBIDDEN.items()
        for match in re.finditer(pattern, line)
    ]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_no_file_names_a_machine_or_a_registry() -> None:
    files = tracked_files()
    assert ROOT / "pyproject.toml" in files
    found = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # an image, an archive
        found += [f"{path.relative_to(ROOT)}:{line}" for line in forbidden_in(text)]
    assert not found, "\n".join(found)


def test_the_search_finds_what_it_is_for() -> None:
    assert forbidden_in("see /ho" + "me/ann/data") and forbidden_in("--root=/wo" + "rk/x")
    assert forbidden_in("https://py" + "pi.org/simple") and forbidden_in("files.python" + "hosted.org")
    assert not forbidden_in("homework/x, https://github.com/home/x, a/work/b, ~/data, /usr/share/datasets")


def test_files_of_the_packages_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "src").rglob("*.py")}
    assert lengths
    too_long = {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > MAX_LINES}
    assert not too_long, f"over {MAX_LINES} lines: {too_long}"


def test_one_version() -> None:
    version = project()["version"]
    stated = {
        str(path.relative_to(ROOT)): ast.literal_eval(node.value)
        for path in (ROOT / "src").glob("*/__init__.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__"
    }
    assert stated, "no package states __version__"
    assert set(stated.values()) == {version}, stated
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_requirement_is_pinned() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, equals, version = line.partition("==")
            assert equals and version and "+" not in version, f"constraints.txt: {line} is no plain pin"
            pins[name.lower().replace("_", "-")] = version
    requirements = [*project()["dependencies"], *(r for e in project()["optional-dependencies"].values() for r in e)]
    for requirement in requirements:
        name = re.split(r"[<>=!~\[; ]", requirement)[0].lower()
        assert name in pins, f"{requirement} has no pin in constraints.txt"
    assert "setuptools" in pins, "the build backend has no pin"


def test_the_wheel_holds_both_packages_and_their_data(tmp_path: Path) -> None:
    # From a copy: a build writes into the tree that it builds from.
    tree = tmp_path / "tree"
    for path in tracked_files():
        name = path.relative_to(ROOT)
        if name.parts[0] in {"src", "pyproject.toml", "README.md", "LICENSE", "NOTICE.md"}:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes(path.read_bytes())
    expected = {path.relative_to(tree / "src").as_posix() for path in (tree / "src").rglob("*") if path.is_file()}
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", tmp_path, tree], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert expected - names == set(), "files of src/ that the wheel lacks"
    assert any(name.startswith("rowdit/data/assets/") for name in names), "the bundled images are missing"
    outside = {name for name in names if name.split("/")[0] not in {"rowmuon", "rowdit"} and ".dist-info/" not in name}
    assert not outside, f"the wheel would install {outside}"


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "NOTICE.md", "CHANGELOG.md", "CITATION.cff", ".ci/run"])
def test_the_frame_is_there(name: str) -> None:
    assert (ROOT / name).stat().st_size > 0
