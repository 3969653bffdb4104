"""How tests are run: an empty run fails, distributed tests never overlap, and nothing gets out to the network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

NOTES_ITS_WORKER = """
import os, pathlib, pytest, time
@pytest.mark.parametrize("number", range(4))
def test_rank(number):
    time.sleep(0.2)
    (pathlib.Path({folder!r}) / f"{name}-{{number}}").write_text(os.environ["PYTEST_XDIST_WORKER"])
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Runs pytest on ``folder`` with this repository's settings and conftest."""
    shutil.copy(TESTS / "conftest.py", folder)
    settings = ["-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(folder), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, str(folder), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("def test_it(): pass", pytest.ExitCode.OK),
        ("def test_it(): assert False", pytest.ExitCode.TESTS_FAILED),
        ("def helper(): pass", pytest.ExitCode.NO_TESTS_COLLECTED),
        ("import pytest\ndef test_it(): pytest.skip('absent')", pytest.ExitCode.NO_TESTS_COLLECTED),
        ("import pytest\n@pytest.mark.slow\ndef test_it(): pass", pytest.ExitCode.NO_TESTS_COLLECTED),
    ],
    ids=["passes", "fails", "none", "all skipped", "all deselected"],
)
def test_exit_code(tmp_path: Path, body: str, code: int) -> None:
    (tmp_path / "test_example.py").write_text(body)
    returncode, output = run(tmp_path)
    assert returncode == code, output


def test_all_skipped_is_noticed_by_xdist_too(tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text("import pytest\ndef test_it(): pytest.skip('absent')")
    returncode, output = run(tmp_path, "-n", "2")
    assert returncode == pytest.ExitCode.NO_TESTS_COLLECTED, output


def test_distributed_tests_share_one_worker(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    for folder in ("distributed", "unit"):
        (tmp_path / folder).mkdir()
        for name in ("one", "two"):
            code = NOTES_ITS_WORKER.format(folder=str(notes), name=f"{folder}-{name}")
            (tmp_path / folder / f"test_{folder}_{name}.py").write_text(code)
    returncode, output = run(tmp_path, "-n", "2")
    assert returncode == 0, output
    workers = {note.name: note.read_text() for note in notes.iterdir()}
    assert len(workers) == 16
    for name in ("unit-one", "unit-two"):
        assert len({worker for note, worker in workers.items() if note.startswith(name)}) == 1, workers
    assert len({worker for name, worker in workers.items() if name.startswith("distributed")}) == 1, workers
    assert len(set(workers.values())) == 2, workers


def test_the_network_is_closed(tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text(
        "import pytest, socket\n"
        "def test_out():\n"
        "    with pytest.raises(OSError, match='tests use no network'):\n"
        "        socket.create_connection(('192.0.2.1', 80), timeout=5)\n"
        "def test_loopback():\n"
        "    server = socket.create_server(('127.0.0.1', 0))\n"
        "    with server, socket.create_connection(server.getsockname(), timeout=5):\n"
        "        pass\n"
    )
    returncode, output = run(tmp_path)
    assert returncode == 0 and "2 passed" in output, output
