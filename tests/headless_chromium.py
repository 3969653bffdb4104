"""Chromium without a window, driven over the DevTools protocol's pipe with nothing but the standard library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """Path of an installed Chromium or Chrome, or None."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    return found or (_MAC if Path(_MAC).exists() else None)


class Browser:
    """One browser process with one page at a time.

    Args:
        program: from `find_chromium`.
        profile: an empty folder for the browser's own files.
    """

    def __init__(self, program: str, profile: Path) -> None:
        # The browser reads commands from its descriptor 3 and answers on 4. Copies with high numbers, so that the
        # child's dup2 can't overwrite one that it still needs.
        read_end, self._commands = os.pipe()
        self._answers, write_end = os.pipe()
        high_read, high_write = (_above(fd, 10) for fd in (read_end, write_end))

        def place() -> None:
            os.dup2(high_read, 3)
            os.dup2(high_write, 4)

        self._log = open(profile / "chromium.log", "wb")  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            close_fds=False,
            preexec_fn=place,
            start_new_session=True,
        )
        for fd in (high_read, high_write):
            os.close(fd)
        self._buffer, self._next_id, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []

    def open(self, url: str, *, width: int, height: int = 900, dark: bool = False, scripts: bool = True) -> None:
        """A fresh page of that size and colour scheme, loaded; `events` is what has happened on it since."""
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", expression))
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, full: bool = True) -> Path:
        """The page as PNG."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result; events that come meanwhile are kept."""
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(method)
            if answer.get("id") == self._next_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, event: str) -> None:
        """Until that event has come."""
        while not any(entry.get("method") == event for entry in self.events):
            self.events.append(self._receive(event))

    def _receive(self, waiting_for: str, timeout: float = 60.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(deadline - time.monotonic(), 0))
            data = os.read(self._answers, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError(f"the browser {'ended' if ready else 'is silent'}, waiting for {waiting_for}")
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def close(self) -> None:
        """Ends the browser and everything that it started."""
        self._session = ""
        try:
            self.call("Browser.close")
            self._process.wait(timeout=20)
        except (RuntimeError, OSError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own group: the browser and its helpers
            self._process.wait()
        finally:
            os.close(self._commands)
            os.close(self._answers)
            self._log.close()


def _above(fd: int, lowest: int) -> int:
    """The same open file at a number of at least `lowest`; `fd` is closed."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(fd)
    return moved
