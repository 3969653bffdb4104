"""Published weights: fetched once, checked by their hash, never read before."""

from __future__ import annotations

import hashlib
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from rowdit.data import DataError
from rowdit.evaluate.weights import WeightsFile, file_hash


@pytest.fixture
def server(tmp_path):
    """Serves tmp_path/www on the loopback."""
    (tmp_path / "www").mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "www")))
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield tmp_path / "www", f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


def published(server, content: bytes, served: bytes | None = None) -> WeightsFile:
    folder, address = server
    (folder / "w.pth").write_bytes(content if served is None else served)
    return WeightsFile("w.pth", f"{address}/w.pth", len(content), hashlib.sha256(content).hexdigest())


def test_fetched_once_and_loaded(server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.save({"a": torch.arange(3)}, tmp_path / "w.pth")
    weights = published(server, (tmp_path / "w.pth").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"w.pth aren't here .*--weights, or fetch it with --download"):
        weights.load()
    seen = []
    assert weights.download(lambda name, done, total: seen.append((name, done, total))) == weights.cached
    assert seen[-1] == ("w.pth", weights.num_bytes, weights.num_bytes)
    assert weights.cached == tmp_path / "cache" / "rowdit" / "weights" / "w.pth"
    (server[0] / "w.pth").unlink()
    weights.download()  # it is here
    assert weights.load()["a"].tolist() == [0, 1, 2]
    assert file_hash(weights.cached) == weights.sha256


def test_other_bytes_are_not_kept(server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = published(server, b"right" * 10, served=b"wrong" * 10)
    with pytest.raises(DataError, match="they were deleted"):
        weights.download()
    assert not weights.cached.exists()


def test_nothing_is_executed(tmp_path):
    """A file with the right hash that holds more than tensors is refused all the same."""

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "touched"), "w"))

    torch.save({"a": Evil()}, tmp_path / "w.pth")
    weights = WeightsFile("w.pth", "http://x", 1, file_hash(tmp_path / "w.pth"))
    with pytest.raises(Exception, match="(?i)weights.?only"):
        weights.load(tmp_path / "w.pth")
    assert not (tmp_path / "touched").exists()
