"""The study of docs/evidence.md as a value, and how it is asked for."""

from __future__ import annotations

import pytest

from rowdit.commands.parsing import parse
from rowdit.commands.study import StudyOptions, parse_data, run, split
from rowdit.recipes.studies import load_study
from rowdit.study.headline import count_parameters
from rowdit.study.staging import next_tasks
from rowdit.train.config import ConfigError


def test_the_small_study_is_what_its_protocol_says() -> None:
    study = load_study("small", {"digits": "folder:anywhere", "emoji": "folder:elsewhere"})
    sizes = {case.name: count_parameters(case.comparison.model) for case in study.cases}
    assert (sizes["S"], sizes["M"], sizes["L"]) == (148_096, 392_736, 978_576)
    assert len(study.seeds) >= 5 and not set(study.tuning_seeds) & set(study.seeds)
    headline = {label: entry for label, entry in study.entries.items() if entry.question == "headline"}
    assert set(headline) == {"adamw", "muon", "periodic"}
    budgets = {len(entry.lrs) + sum(map(len, entry.axes.values())) for entry in headline.values()}
    assert len(budgets) == 1 and all(len(entry.lrs) >= 5 for entry in headline.values())
    assert next_tasks(study, {})[0].seed in study.tuning_seeds
    assert {case.name: case.dataset for case in study.cases[4:]} == {"digits": "digits", "emoji": "emoji"}
    assert [case.name for case in load_study("small", {}).cases] == ["S", "S-long", "M", "L"]


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="there is no study 'smal'; did you mean 'small'"):
        load_study("smal", {})
    with pytest.raises(ConfigError, match="takes no data set 'emojis'; did you mean 'emoji'"):
        load_study("small", {"emojis": "x"})
    with pytest.raises(ConfigError, match="which study"):
        run([])
    with pytest.raises(ConfigError, match="must be NAME=SOURCE"):
        parse_data(("emoji",))
    with pytest.raises(ConfigError, match="given before"):
        parse_data(("a=x", "a=y"))
    assert split("--cases", "S, M") == ("S", "M") and split("--cases", None) is None


@pytest.mark.parametrize(
    "arguments",
    [["--data", "a=x", "b=y"], ["--data", "a=x", "--cases", "S", "--data=b=y"], ["--data=a=x", "--data", "b=y"]],
)
def test_no_data_set_is_dropped_unsaid(arguments: list[str]) -> None:
    assert parse("study", StudyOptions, ["small", *arguments]).data == ("a=x", "b=y")
