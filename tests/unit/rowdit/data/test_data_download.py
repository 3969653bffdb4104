"""Downloads, against a server on this machine."""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from rowdit.commands import data as data_command
from rowdit.data import DataError, download, fashion_mnist


@dataclass
class Server:
    """What the server holds and how it behaves; ``requests`` records (name, first byte asked for)."""

    files: dict[str, bytes] = field(default_factory=dict)
    url: str = ""
    knows_ranges: bool = True
    num_bytes_before_break: int | None = None  # then the connection breaks, on every request
    requests: list[tuple[str, int]] = field(default_factory=list)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rsplit("/", 1)[-1]
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
            state.requests.append((name, start))
            content = state.files.get(name)
            if content is None:
                return self.send_error(404)
            if start and state.knows_ranges and start >= len(content):
                return self.send_error(416)
            start = start if state.knows_ranges else 0
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start:][: state.num_bytes_before_break])

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{httpd.server_port}/some/place/"
    yield state
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.fixture
def small_set(server, monkeypatch):
    """The server has four small files, and they are what is expected."""
    rng = np.random.default_rng(0)
    for split, names in fashion_mnist.IDX_FILES.items():
        num = 5 if split == "train" else 3
        for name, shape in zip(names, ((num, 28, 28), (num,)), strict=True):
            header = bytes((0, 0, 8, len(shape))) + b"".join(size.to_bytes(4) for size in shape)
            content = header + rng.integers(0, 10, shape, np.uint8).tobytes()
            packed = gzip.compress(content)
            server.files[name] = packed
            monkeypatch.setitem(fashion_mnist.IDX_SHA256, name, hashlib.sha256(content).hexdigest())
            monkeypatch.setitem(download.FASHION_MNIST_FILES, name, (len(packed), hashlib.sha256(packed).hexdigest()))
    return server


@pytest.fixture
def one_file(server):
    """A file of 200,000 bytes and a function that fetches it."""
    content = np.random.default_rng(1).integers(0, 256, 200_000, np.uint8).tobytes()
    server.files["file"] = content
    sha256 = hashlib.sha256(content).hexdigest()

    def fetch(path: Path, **changes):
        arguments = {"url": server.url + "file", "path": path, "num_bytes": len(content), "sha256": sha256}
        download.download(**{**arguments, **changes})

    return content, fetch


def test_the_full_set_is_fetched_into_the_cache_and_found_there(small_set, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "none")
    seen = []
    folder = download.get_fashion_mnist(url=small_set.url, on_progress=lambda *now: seen.append(now))
    assert folder == tmp_path / "rowdit" / "fashion-mnist"
    assert sorted(path.name for path in folder.iterdir()) == sorted(download.FASHION_MNIST_FILES)
    assert len(fashion_mnist.full()) == 5 and len(fashion_mnist.full(split="reference")) == 3
    assert {(name, total, total) for name, (total, _) in download.FASHION_MNIST_FILES.items()} <= set(seen)


def test_what_is_there_is_not_fetched_again(small_set, tmp_path):
    download.get_fashion_mnist(tmp_path, small_set.url)
    small_set.requests.clear()
    name = "train-labels-idx1-ubyte.gz"
    content = gzip.decompress((tmp_path / name).read_bytes())
    (tmp_path / name).write_bytes(gzip.compress(content, 1))  # packed in another way, as Debian's are: right too
    download.get_fashion_mnist(tmp_path, small_set.url)
    assert small_set.requests == []
    (tmp_path / name).write_bytes(b"damaged")
    download.get_fashion_mnist(tmp_path, small_set.url)
    assert small_set.requests == [(name, 0)]


def test_the_published_sizes_and_hashes_are_complete():
    assert set(download.FASHION_MNIST_FILES) == set(fashion_mnist.IDX_SHA256)
    assert all(len(sha256) == 64 for _, sha256 in download.FASHION_MNIST_FILES.values())
    assert sum(num_bytes for num_bytes, _ in download.FASHION_MNIST_FILES.values()) == 30_878_645


def test_a_broken_connection_is_taken_up_again(server, one_file, tmp_path):
    content, fetch = one_file
    server.num_bytes_before_break = 90_000
    fetch(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content
    assert [start for _, start in server.requests] == [0, 90_000, 180_000]


def test_what_came_is_kept_and_the_next_call_goes_on(server, one_file, tmp_path):
    content, fetch = one_file
    server.num_bytes_before_break = 30_000
    with pytest.raises(DataError, match="90000 of 200000 bytes; they are kept"):
        fetch(tmp_path / "file")
    assert not (tmp_path / "file").exists()
    assert (tmp_path / "file.part").read_bytes() == content[:90_000]
    server.num_bytes_before_break = None
    fetch(tmp_path / "file")
    assert server.requests[-1] == ("file", 90_000)
    assert (tmp_path / "file").read_bytes() == content and not (tmp_path / "file.part").exists()


def test_a_server_without_ranges_begins_anew(server, one_file, tmp_path):
    content, fetch = one_file
    server.knows_ranges = False
    (tmp_path / "file.part").write_bytes(content[:70_000])
    fetch(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content


def test_a_part_that_is_already_whole_needs_no_server(server, one_file, tmp_path):
    content, fetch = one_file
    (tmp_path / "file.part").write_bytes(content)
    fetch(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content and server.requests == []


@pytest.mark.parametrize("part", [b"x" * 50_000, b"x" * 200_000, b"x" * 300_000], ids=len)
def test_wrong_bytes_are_deleted_and_the_next_call_starts_clean(server, one_file, tmp_path, part):
    content, fetch = one_file
    (tmp_path / "file.part").write_bytes(part)
    with pytest.raises(DataError, match="sha256.*they were deleted"):
        fetch(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
    fetch(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content


def test_an_old_file_stays_until_the_new_one_is_right(server, one_file, tmp_path):
    content, fetch = one_file
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(DataError, match="sha256"):
        fetch(tmp_path / "file", sha256="0" * 64)
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_server_that_sends_without_end_is_cut_off(server, one_file, tmp_path):
    _, fetch = one_file
    server.files["file"] = bytes(3_000_000)
    sizes = []
    with pytest.raises(DataError, match="sha256"):
        fetch(tmp_path / "file", on_progress=lambda name, done, total: sizes.append(done))
    assert max(sizes) <= 200_000 + (1 << 16)


def test_a_part_longer_than_the_servers_file_is_dropped(server, one_file, tmp_path):
    _, fetch = one_file
    server.files["file"] = b"short"
    (tmp_path / "file.part").write_bytes(bytes(1000))
    with pytest.raises(DataError, match="5 of 200000 bytes"):
        fetch(tmp_path / "file")


def test_no_network_and_refusals_say_so(server, one_file, tmp_path):
    _, fetch = one_file
    with pytest.raises(DataError, match="404"):
        fetch(tmp_path / "file", url=server.url + "other")
    with pytest.raises(DataError, match="can't be reached.*is there a network"):
        fetch(tmp_path / "file", url="http://127.0.0.1:9/file")  # the discard port: nobody listens
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="no http or https"):
        download.get_fashion_mnist(tmp_path, url="file:///etc")


def test_two_writers_are_kept_apart(server, one_file, tmp_path):
    _, fetch = one_file
    with open(tmp_path / "file.part", "ab") as other:
        other.write(b"x")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_SH)  # so ours must be exclusive
        with pytest.raises(DataError, match="another process"):
            fetch(tmp_path / "file")
    assert (tmp_path / "file.part").read_bytes() == b"x"


def test_a_disk_that_is_too_small_or_runs_full_is_named(small_set, tmp_path, monkeypatch):
    def run_full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(download, "_receive", run_full)
        with pytest.raises(DataError, match="disk is full; make room"):
            download.get_fashion_mnist(tmp_path / "new", small_set.url)
    assert list((tmp_path / "new").iterdir()) == []

    class Usage:
        free = 10

    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: Usage)
    with pytest.raises(DataError, match="10 are free"):
        download.get_fashion_mnist(tmp_path / "new", small_set.url)


def test_a_destination_that_is_a_file_is_named(small_set, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="can't be used.*name another folder"):
        download.get_fashion_mnist(tmp_path / "file", small_set.url)


def test_the_command_shows_how_far_it_is(small_set, tmp_path, capsys):
    assert data_command.run(["get", "fashion-mnist", "--folder", str(tmp_path), "--url", small_set.url]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == str(tmp_path)
    for name, (num_bytes, _) in download.FASHION_MNIST_FILES.items():
        assert f"{name}: {num_bytes / 1e6:.1f} of {num_bytes / 1e6:.1f} MB" in shown.err


def test_a_line_a_tenth_where_there_is_no_terminal_and_a_bar_where_there_is(capsys, monkeypatch):
    with data_command.ShownDownloads() as shown:
        for done in range(0, 1001):
            shown("file", done, 1000)
    assert len(capsys.readouterr().err.splitlines()) == 11
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    with data_command.ShownDownloads() as shown:
        shown("file", 500, 1000)
        shown("file", 1000, 1000)
    bar = capsys.readouterr().err
    assert "file" in bar and "1.0/1.0 kB" in bar
