"""What a person sees while it trains: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_INTERVAL = 10.0  # seconds between plain lines


class Progress(Protocol):
    """What the loop reports to. `Silent` is one; so is `Live` below."""

    def start_run(self, label: str, step: int) -> None: ...

    def step(self, step: int, loss: float, num_images: int) -> None: ...

    def evaluating(self, step: int) -> None: ...

    def evaluated(self, step: int, summary: str, seconds: float) -> None: ...

    def message(self, text: str) -> None: ...


class Silent:
    """Reports nothing."""

    def start_run(self, label: str, step: int) -> None:
        pass

    def step(self, step: int, loss: float, num_images: int) -> None:
        pass

    def evaluating(self, step: int) -> None:
        pass

    def evaluated(self, step: int, summary: str, seconds: float) -> None:
        pass

    def message(self, text: str) -> None:
        pass


class ConsoleProgress:
    """Rate, loss, what is left and for how long, over all runs of a comparison.

    Args:
        runs: (label, steps left, evaluations left) of the runs ahead, in order.
        steps: steps of one run.
        console: where to write; a live line if it is a terminal, a plain line every ten seconds if not.
    """

    def __init__(self, runs: list[tuple[str, int, int]], steps: int, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stdout)
        self.num_steps = steps
        self.ahead = {label: (num_steps, num_evaluations) for label, num_steps, num_evaluations in runs}
        self.total_steps = max(1, sum(num_steps for _, num_steps, _ in runs))
        self.label = ""
        self.loss: float | None = None
        self.step_times: deque[float] = deque(maxlen=50)
        self.evaluation_seconds = 0.0
        self._last = self._last_plain = time.perf_counter()
        self._live = (
            Live(console=self.console, refresh_per_second=4, transient=True) if self.console.is_terminal else None
        )

    def __enter__(self) -> ConsoleProgress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def start_run(self, label: str, step: int) -> None:
        self.label, self.loss = label, None
        self._last = time.perf_counter()
        if step:
            self.message(f"{label}: resuming at step {step}")

    def step(self, step: int, loss: float, num_images: int) -> None:
        now = time.perf_counter()
        self.step_times.append((now - self._last) / num_images)
        self._last = now
        # Smoothed over about 20 steps: the loss of one batch depends mostly on which times were drawn.
        self.loss = loss if self.loss is None else self.loss + 0.05 * (loss - self.loss)
        steps_left, evaluations_left = self.ahead[self.label]
        self.ahead[self.label] = (max(0, steps_left - 1), evaluations_left)
        rate = len(self.step_times) / sum(self.step_times)
        left = self._seconds_left(num_images / rate)
        self._show(
            f"{self.label}: step {step}/{self.num_steps}, {self._details()}loss {self.loss:.4f}, "
            f"{rate:.0f} images/s, {_duration(left)} left in all"
        )

    def evaluating(self, step: int) -> None:
        self._show(f"{self.label}: step {step}/{self.num_steps}, evaluating")

    def evaluated(self, step: int, summary: str, seconds: float) -> None:
        self.evaluation_seconds = seconds
        steps_left, evaluations_left = self.ahead[self.label]
        self.ahead[self.label] = (steps_left, max(0, evaluations_left - 1))
        self.message(f"{self.label}: step {step}/{self.num_steps}, {summary}")
        self._last = time.perf_counter()

    def _details(self) -> str:
        """More about the last step, for whom it concerns."""
        return ""

    def message(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _show(self, text: str) -> None:
        if self._live:
            steps_left = sum(steps for steps, _ in self.ahead.values())
            line = Table.grid(padding=(0, 1))
            bar = ProgressBar(total=self.total_steps, completed=self.total_steps - steps_left, width=12)
            line.add_row(bar, Text(text, no_wrap=True, overflow="ellipsis"))
            self._live.update(line)
        elif time.perf_counter() - self._last_plain >= PLAIN_INTERVAL:
            self.message(text)
            self._last_plain = time.perf_counter()

    def _seconds_left(self, step_seconds: float) -> float:
        steps = sum(steps for steps, _ in self.ahead.values())
        evaluations = sum(evaluations for _, evaluations in self.ahead.values())
        return steps * step_seconds + evaluations * self.evaluation_seconds


class RunProgress(ConsoleProgress):
    """`ConsoleProgress` of a single run, with more of each step: it is a logger too.

    Args:
        label: name of the run.
        steps: of the run. evaluations: of the run.
        console: as for `ConsoleProgress`.
    """

    def __init__(self, label: str, steps: int, evaluations: int, console: Console | None = None) -> None:
        super().__init__([(label, steps, evaluations)], steps, console)
        self._row: dict[str, Any] = {}
        self._optimizer: dict[str, deque[float]] = {}
        self._shares: deque[float] = deque(maxlen=50)

    def start_run(self, label: str, step: int) -> None:
        steps, evaluations = self.ahead[label]
        self.ahead[label] = (steps - step, evaluations)
        super().start_run(label, step)

    def log_step(self, row: dict[str, Any]) -> None:
        self._row = row
        self._optimizer.setdefault(row["kind"], deque(maxlen=20)).append(row["optimizer_seconds"])
        self._shares.append(row["optimizer_seconds"] / row["seconds"])
        if row["kind"] == "skipped":
            self.message(f"{self.label}: step {row['step']} skipped, gradient norm {row['grad_norm']:.4g}")

    def log_evaluation(self, row: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass

    def _details(self) -> str:
        kinds = {kind: times for kind, times in self._optimizer.items() if kind != "skipped"}
        times = ", ".join(f"{kind} {1000 * sum(t) / len(t):.3g} ms" for kind, t in sorted(kinds.items()))
        share = sum(self._shares) / len(self._shares) if self._shares else 0.0
        return (
            f"{self._row['images_seen']:,} images, gradient norm {self._row['grad_norm']:.3g}, "
            f"optimizer {share:.0%} ({times}), "
        )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
