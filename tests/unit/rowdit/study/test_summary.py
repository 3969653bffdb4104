"""The numbers of a comparison, on curves whose answers are known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rowdit.study.summary import RunRecord, best_row, summarize_optimizers, time_to_reach, value_at_time


def _rows(*points: tuple[float, float, float, float], val: float = 1.0) -> list[dict[str, Any]]:
    """Rows of (step, seconds, score_select, score_report)."""
    return [
        {"step": step, "seconds": seconds, "score_select": select, "score_report": report, "val_loss": val / step}
        for step, seconds, select, report in points
    ]


def _log(kinds: dict[str, tuple[int, float, float]]) -> list[dict[str, Any]]:
    """Log rows: kind -> (how many, seconds, optimizer_seconds), after three slow first steps."""
    rows = [{"kind": kind, "seconds": 99.0, "optimizer_seconds": 99.0} for kind in list(kinds)[:1] * 3]
    for kind, (num, seconds, optimizer_seconds) in kinds.items():
        rows += [{"kind": kind, "seconds": seconds, "optimizer_seconds": optimizer_seconds}] * num
    return [{"step": step, **row} for step, row in enumerate(rows, start=1)]


ADAMW = _rows((100, 10, 50, 52), (200, 20, 40, 43), (300, 30, 30, 31), (400, 40, 35, 33))
MUON = _rows((100, 20, 42, 41), (200, 40, 20, 21), (300, 60, 19, 23), (400, 80, 18, 22), val=0.5)


def _summary(**curves: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    log = _log({"adamw": (10, 0.1, 0.01)})
    return summarize_optimizers([RunRecord(name, 0, log, rows) for name, rows in curves.items()], list(curves))


def test_best_is_chosen_on_one_set_and_scored_on_the_other() -> None:
    """Muon's smallest reporting score, 21, isn't what the selecting set chooses."""
    entries = _summary(adamw=ADAMW, muon=MUON)
    assert entries["adamw"]["best"] | {"per_seed": None} == {"score": 31, "step": 300, "seconds": 30, "per_seed": None}
    assert entries["muon"]["best"]["score"] == 22 and entries["muon"]["best"]["step"] == 400


def test_final_is_the_last_row() -> None:
    assert _summary(adamw=ADAMW)["adamw"]["final"]["score"] == 33


def test_the_fixed_step_is_half_way_and_the_same_for_all() -> None:
    entries = _summary(adamw=ADAMW, muon=MUON)
    assert [entries[name]["at_fixed_step"]["step"] for name in entries] == [200, 200]
    assert [entries[name]["at_fixed_step"]["score"] for name in entries] == [43, 21]


def test_the_fixed_time_is_when_the_fastest_was_done() -> None:
    """AdamW is done at 40 s; Muon is at step 200 then."""
    entries = _summary(adamw=ADAMW, muon=MUON)
    assert entries["adamw"]["at_fixed_time"]["score"] == 33
    muon = entries["muon"]["at_fixed_time"]
    assert (muon["score"], muon["step"], muon["seconds"]) == (21, 200, 40)


def test_values_between_rows_are_linear_in_the_seconds() -> None:
    assert value_at_time(MUON, "score_report", 30) == {"score": 31, "step": 150, "seconds": 30}
    assert value_at_time(MUON, "score_report", 5)["score"] == 41  # not extrapolated
    assert value_at_time(MUON, "score_report", 500)["score"] == 22


def test_time_to_adamw_best() -> None:
    """Muon passes 31 half way between 41 at 20 s and 21 at 40 s."""
    entries = _summary(adamw=ADAMW, muon=MUON)
    assert entries["muon"]["time_to_adamw_best"] == pytest.approx(30)
    assert entries["adamw"]["time_to_adamw_best"] == pytest.approx(30)
    assert time_to_reach(ADAMW, "score_report", 22) is None
    assert time_to_reach(MUON, "score_report", 60) == 20  # the first row is already better: no extrapolation
    assert "time_to_adamw_best" in entries["muon"]["val_loss"]


def test_without_adamw_there_is_nothing_to_reach() -> None:
    entry = _summary(muon=MUON)["muon"]
    assert entry["time_to_adamw_best"] is None and "gain_over_adamw" not in entry


def test_the_validation_loss_has_the_same_numbers() -> None:
    val = _summary(adamw=ADAMW, muon=MUON)["muon"]["val_loss"]
    assert val["best"]["score"] == val["final"]["score"] == 0.5 / 400
    assert val["at_fixed_step"]["score"] == 0.5 / 200
    # 1/400 of AdamW: Muon has 0.5/100 at 20 s and 0.5/200 = 1/400 at 40 s
    assert val["time_to_adamw_best"] == pytest.approx(40)


def test_gains_are_relative_to_adamw() -> None:
    entries = _summary(adamw=ADAMW, muon=MUON)
    assert entries["muon"]["gain_over_adamw"]["best"] == pytest.approx(1 - 22 / 31)
    assert entries["adamw"]["gain_over_adamw"]["final"] == 0


def test_means_over_seeds_are_of_paired_values() -> None:
    log = _log({"adamw": (10, 0.1, 0.01)})
    worse = _rows((100, 10, 80, 80), (200, 20, 62, 62))
    better = _rows((100, 10, 40, 40), (200, 20, 31, 31))
    runs = [
        RunRecord("adamw", 0, log, ADAMW), RunRecord("adamw", 1, log, worse),
        RunRecord("muon", 1, log, better), RunRecord("muon", 0, log, MUON),
    ]  # fmt: skip
    entries = summarize_optimizers(runs, ["adamw", "muon"])
    assert entries["muon"]["seeds"] == [0, 1]
    assert [p["score"] for p in entries["muon"]["best"]["per_seed"]] == [22, 31]
    assert entries["muon"]["best"]["score"] == pytest.approx(26.5)
    assert entries["muon"]["best"]["step"] == 300  # the mean of 400 and 200
    assert entries["muon"]["gain_over_adamw"]["best"] == pytest.approx((1 - 22 / 31 + 0.5) / 2)
    assert [curve["seed"] for curve in entries["muon"]["curve"]] == [0, 1]


@pytest.mark.parametrize("nan", [math.nan, "nan"])
def test_a_diverged_run_has_no_number_rather_than_a_good_one(nan: float | str) -> None:
    diverged = _rows((100, 10, 50, 52), (200, 20, nan, nan))  # type: ignore[arg-type]
    entries = _summary(adamw=ADAMW, muon=diverged)
    assert entries["muon"]["best"]["score"] == 52
    assert entries["muon"]["final"]["score"] is None
    assert entries["muon"]["gain_over_adamw"]["final"] is None
    hopeless = _rows((100, 10, nan, nan))  # type: ignore[arg-type]
    entry = _summary(adamw=ADAMW, muon=hopeless)["muon"]
    assert entry["best"]["score"] is None and entry["time_to_adamw_best"] is None
    assert best_row(hopeless, "score_select") is None


def test_a_mean_over_seeds_with_a_gap_is_no_number() -> None:
    log = _log({"adamw": (10, 0.1, 0.01)})
    gap = _rows((100, 10, math.nan, math.nan))
    runs = [RunRecord("adamw", 0, log, ADAMW), RunRecord("adamw", 1, log, gap)]
    entry = summarize_optimizers(runs, ["adamw"])["adamw"]
    assert entry["best"]["score"] is None
    assert [p["score"] for p in entry["best"]["per_seed"]] == [31, None]


def test_times_are_medians_by_kind_weighted_by_their_share() -> None:
    """The three slow first steps count for nothing, and one hiccup doesn't either."""
    log = _log({"refresh": (5, 0.16, 0.06), "row": (10, 0.1, 0.003)})
    log.append({"step": 99, "kind": "row", "seconds": 9.0, "optimizer_seconds": 9.0})
    log.append({"step": 100, "kind": "skipped", "seconds": 0.1, "optimizer_seconds": 0.0})
    entry = summarize_optimizers([RunRecord("periodic", 0, log, MUON)], ["periodic"])["periodic"]
    cost = entry["optimizer_seconds_per_step"]
    assert (cost["refresh"], cost["row"]) == (0.06, 0.003)
    assert cost["mean"] == pytest.approx((5 * 0.06 + 11 * 0.003) / 16)
    assert entry["step_seconds"] == pytest.approx((5 * 0.16 + 11 * 0.1) / 16)
    assert entry["optimizer_share"] == pytest.approx(cost["mean"] / entry["step_seconds"])
    assert entry["num_skipped"] == 1


def test_kinds_that_an_optimizer_has_not_are_none() -> None:
    cost = _summary(adamw=ADAMW)["adamw"]["optimizer_seconds_per_step"]
    assert cost == {"mean": pytest.approx(0.01), "refresh": None, "row": None}


def test_runs_without_evaluations_are_refused() -> None:
    with pytest.raises(ValueError, match="no finished run of muon"):
        summarize_optimizers([], ["muon"])
    with pytest.raises(ValueError, match="muon, seed 3: no evaluation"):
        summarize_optimizers([RunRecord("muon", 3, [], [])], ["muon"])
