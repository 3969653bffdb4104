"""The guard sees what got worse, and isn't fooled by a machine that was disturbed for a while."""

from __future__ import annotations

import math

import pytest
import torch

from rowdit.bench import guard
from rowdit.bench.guard import LIMITS, Limit, judge, page, run_guard

LIMITS_HERE = (Limit("bytes", 100), Limit("ratio", 0.5, margin=1.3))


def test_counts_have_no_margin_and_ratios_have_theirs() -> None:
    assert judge({"bytes": 100, "ratio": 0.65}, LIMITS_HERE) == []
    assert judge({"bytes": 101, "ratio": 0.66}, LIMITS_HERE) == [
        "bytes: 101, over 100 (100 x 1)",
        "ratio: 0.66, over 0.65 (0.5 x 1.3)",
    ]
    assert judge({"ratio": math.nan}, LIMITS_HERE) and judge({"new": 1.0}, LIMITS_HERE) == ["new: 1 has no limit"]
    assert "**no**" in page({"bytes": 101}, LIMITS_HERE) and "yes" in page({"bytes": 99}, LIMITS_HERE)


@pytest.mark.parametrize(
    ("values", "num_attempts", "num_wrong"), [([0.6], 1, 0), ([9.0, 0.7, 0.6], 3, 0), ([9.0, 0.7, 0.66], 3, 1)]
)
def test_a_ratio_gets_three_attempts(values: list[float], num_attempts: int, num_wrong: int) -> None:
    left = list(values)
    found, wrong = run_guard(lambda: {"bytes": 1}, lambda: {"ratio": left.pop(0)}, LIMITS_HERE)
    assert len(values) - len(left) == num_attempts
    assert found == {"bytes": 1, "ratio": min(values)} and len(wrong) == num_wrong


def test_a_count_gets_one() -> None:
    found, wrong = run_guard(lambda: {"bytes": 101}, lambda: {"ratio": 0.1}, LIMITS_HERE)
    assert wrong == ["bytes: 101, over 100 (100 x 1)"]


def test_row_steps_send_nothing_whatever_the_limits_say() -> None:
    limits = {limit.name: limit for limit in LIMITS}
    assert len(limits) == len(LIMITS)
    for refresh in ("exchange", "gather"):
        assert limits[f"{refresh}, row step: bytes sent"].at_most == 0
        assert limits[f"{refresh}, row step: collectives"].at_most == 0
    assert limits["recompilations after the first period"].at_most == 0
    assert limits["k1_over_torch_muon"].at_most < 1 and limits["k3_over_k1"].at_most < 0.5


def test_a_recompilation_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in whose step compiles anew whenever lr changes, as one with lr as a Python number would."""

    class Recompiles(torch.optim.SGD):
        next_step_kind = "refresh"

        def step(self, closure=None):
            lr = self.param_groups[0]["lr"]
            torch._dynamo.reset()
            torch.compile(lambda x: x * lr, backend="eager")(torch.ones(2))

    class Stands:
        def __init__(self) -> None:
            self.optimizer = Recompiles([torch.nn.Parameter(torch.ones(2))], lr=0.1)

        def timed_period(self, period: int) -> None:
            self.optimizer.step()

        def timed_step(self) -> None:
            self.optimizer.step()

    monkeypatch.setattr(guard, "periodic", lambda *args, **kwargs: Stands())
    assert guard._count_recompilations() == 2 * guard.PERIOD
