"""The page of a training run, read back and compared with the folder that it was made from."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from page_reader import Page, charts_of
from rowdit.commands import report as report_command
from rowdit.study.report import StudyError, write_report
from rowdit.study.report.run_curves import thinned
from rowdit.study.report.run_data import read_run
from rowdit.study.report.run_phases import breakdowns
from synthetic_run import OPTIMIZER, REST, SHARED, make_run
from synthetic_study import make_study


def read_page(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def rows_of(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "my-run")


# ------------------------------------------------------------------------------------------------------------ the page
def test_the_page_is_one_file_that_asks_for_nothing(run):
    path = write_report(run)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert path == run / "report.html" and text.startswith("<!doctype html>\n")
    assert not re.search(r"url\(|@import|https?://", text)
    assert all(e.attributes["src"].startswith("data:") for e in page.all("img"))
    ids = [e.attributes["id"] for e in page.elements if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    policy = next(e for e in page.all("meta") if "http-equiv" in e.attributes)
    assert "default-src 'none'" in policy.attributes["content"]


def test_scores_from_too_few_images_are_marked(run):
    assert "Caution" not in write_report(run).read_text(encoding="utf-8")
    rows = rows_of(run, "evaluations")
    rows[-1]["fingerprint"] = {"network": {"dim": 320}, "num_images": 100, "reference": {"num_images": 200}}
    (run / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = "Caution: 200 images of the reference and 100 samples are too few for a Frechet distance of 320 features"
    assert any(said in element.text for element in read_page(run).all("p", "warning"))


def test_equal_folders_give_equal_pages(tmp_path):
    first, second = (make_run(tmp_path / name / "run") for name in ("a", "b"))
    assert write_report(first).read_bytes() == write_report(second).read_bytes()


def test_the_head_says_how_far_it_came_and_what_it_reached(run):
    page = read_page(run)
    last = rows_of(run, "evaluations")[-1]
    assert page.one("h1").text == f"Finished 120 steps, validation loss {last['val_loss']:.4f}"
    assert page.one("p", "lede").text.startswith(
        "Periodic Row-wise Muon, period 3, learning rate 0.01, 16 images a step."
    )
    cards = dict(zip((e.text for e in page.all("h3")), (e.text for e in page.all("p", "big")), strict=True))
    assert cards["Steps"] == "120" and cards["Score"] == f"{last['score_report']:.2f}"
    seconds = sum(row["seconds"] for row in rows_of(run, "log"))
    optimizer = sum(row["optimizer_seconds"] for row in rows_of(run, "log"))
    assert cards["Speed"] == f"{120 * 16 / seconds:.0f}"
    assert cards["Optimizer"] == f"{100 * optimizer / seconds:.1f}\u00a0%"


# -------------------------------------------------------------------------------------------------------------- curves
def test_every_curve_is_drawn_against_steps_and_against_seconds(run):
    charts = charts_of(read_page(run))
    drawn = ("loss", "grad-norm", "val", "val-t", "score", "lr")
    assert set(charts) == {f"{key}-by-{axis}" for key in drawn for axis in ("step", "seconds")} | {"optimizer-time"}
    evaluations = rows_of(run, "evaluations")
    for axis in ("step", "seconds"):
        (val,) = charts[f"val-by-{axis}"]["series"]
        assert val["x"] == pytest.approx([row[axis] for row in evaluations], rel=1e-5)
        assert [float(y) for y in val["y"]] == pytest.approx([row["val_loss"] for row in evaluations], rel=1e-3)
        bins = {s["name"]: [float(y) for y in s["y"]] for s in charts[f"val-t-by-{axis}"]["series"]}
        assert list(bins) == [f"t in {b}" for b in ("0.00 to 0.25", "0.25 to 0.50", "0.50 to 0.75", "0.75 to 1.00")]
        third = [row["val_loss_by_t"]["0.50-0.75"] for row in evaluations]
        assert bins["t in 0.50 to 0.75"] == pytest.approx(third, rel=1e-3)


def test_time_is_the_sum_of_the_steps_so_far(run):
    (line,) = charts_of(read_page(run))["loss-by-seconds"]["series"]
    seconds = [row["seconds"] for row in rows_of(run, "log")]
    middle = sum(sum(seconds[:step]) for step in range(116, 121)) / 5  # of the last window, steps 116 to 120
    assert line["x"][-1] == pytest.approx(middle, rel=1e-5)


def test_loss_and_gradient_norm_are_raw_and_smoothed(run):
    page = read_page(run)
    log = rows_of(run, "log")
    for column, key in (("loss", "loss"), ("grad_norm", "grad-norm")):
        (line,) = charts_of(page)[f"{key}-by-step"]["series"]
        assert line["name"] == "mean of 5 steps" and len(line["y"]) == 24
        assert float(line["y"][2]) == pytest.approx(sum(row[column] for row in log[10:15]) / 5, rel=1e-3)
        plot = next(
            p for p in page.all("div", "plot") if page.by_id(f"{key}-by-step-title") in page.all("title", "", p)
        )
        assert page.one("path", "faint", inside=plot).attributes["d"].count("L") == 119


def test_refreshes_and_row_steps_are_told_apart(run):
    series = {s["name"]: s["x"] for s in charts_of(read_page(run))["optimizer-time"]["series"]}
    assert set(series) == {"Periodic, full step", "Periodic, row step"}
    assert all(step % 3 == 1 for step in series["Periodic, full step"])
    assert not any(step % 3 == 1 for step in series["Periodic, row step"])


def test_a_long_log_is_thinned_without_losing_its_spikes():
    y = [1.0] * 10_000
    y[7_777], y[3_333] = 9.0, float("nan")
    x, thin = thinned(range(10_000), y, num=100)
    assert len(x) <= 200 and x == sorted(x)
    assert (7_777, 9.0) in list(zip(x, thin, strict=True)) and thin.count(9.0) == 1


# --------------------------------------------------------------------------------------------------------------- phases
def test_the_phases_of_a_step_sum_to_the_step(run):
    every, refresh, row = breakdowns(read_run(run))
    assert (every.num_steps, refresh.num_steps, row.num_steps) == (120, 40, 80)
    for found, kind in ((refresh, "refresh"), (row, "row")):
        assert dict(found.parts) == pytest.approx(SHARED | OPTIMIZER[kind] | {"rest": REST})
        assert found.optimizer == pytest.approx(sum(OPTIMIZER[kind].values()))
    assert sum(every.parts.values()) == pytest.approx(every.seconds)
    assert every.seconds == pytest.approx((40 * refresh.seconds + 80 * row.seconds) / 120)


def test_the_table_of_phases_has_a_column_for_each_kind_of_step(run):
    page = read_page(run)
    table = page.one("table", "phases")
    rows = {}
    for row in page.all("tr", inside=table):
        cells = [c.text for c in page.elements if c.tag in ("th", "td") and row in c.parents]
        rows[cells[0]] = cells[1:]
    assert rows[""] == ["All steps120", "Full steps40", "Row steps80"]
    assert rows["Newton-Schulzoptimizer"][1:] == ["40.0\u00a0ms26.7\u00a0%", "–"]
    assert rows["Row stepoptimizer"][1:] == ["–", "4.00\u00a0ms3.8\u00a0%"]
    assert rows["Optimizer"][1:] == ["49.0\u00a0ms32.7\u00a0%", "5.00\u00a0ms4.7\u00a0%"]


# ------------------------------------------------------------------------------------------------- samples and settings
def test_sample_grids_are_in_the_page_byte_for_byte(run):
    images = read_page(run).all("img")
    files = sorted((run / "samples").iterdir())
    assert len(images) == len(files) == 5
    for image, file in zip(images, files, strict=True):
        assert base64.b64decode(image.attributes["src"].split(",")[1]) == file.read_bytes()


def test_of_many_grids_an_even_choice_is_shown_and_said(tmp_path):
    page = read_page(make_run(tmp_path / "run", evaluate_every=3))
    shown = [e.attributes["aria-label"] for e in page.all("input") if e.attributes["name"] == "sample"]
    assert len(shown) == len(page.all("img")) == 12
    assert shown[0] == "Samples at step 0" and shown[-1] == "Samples at step 120"
    assert "12 of 41 grids" in page.by_id("samples").text


def test_config_fingerprints_and_routing_are_on_the_page(run):
    page = read_page(run)
    pairs = dict(zip((e.text for e in page.all("dt")), (e.text for e in page.all("dd")), strict=True))
    assert pairs["optimizer.betas"] == "0.9, 0.95" and pairs["train.skip_grad_norm"] == "none"
    assert pairs["data"] == "bundled/train:100x1x28x28:sha256-0123abcd"
    assert pairs["network.name"] == "effnet_lite0" and pairs["num_images"] == "100"
    assert page.one("pre").text.startswith("blocks.0.attention.qkv.weight")


# ------------------------------------------------------------------------------------------- runs that aren't like this
def no_bare_nan(page: Page) -> bool:
    return not re.search(r"\b(nan|NaN|inf|None)\b", page.visible_text())


def test_a_run_on_its_way_without_evaluations(tmp_path):
    page = read_page(make_run(tmp_path / "run", last_step=40, evaluate_every=None, ending=None))
    loss = sum(row["loss"] for row in rows_of(tmp_path / "run", "log")[35:]) / 5
    assert page.one("h1").text == f"At step 40 of 120, training loss {loss:.4f}"
    lede = page.one("p", "lede").text
    assert "on its way, or was interrupted" in lede and "Nothing was evaluated yet." in lede
    assert {key.rpartition("-by-")[0] for key in charts_of(page)} == {"loss", "grad-norm", "lr", ""}
    assert "No sample grids were written." in page.by_id("samples").text
    assert no_bare_nan(page)


def test_a_row_that_a_kill_cut_short_is_left_out(tmp_path):
    run = make_run(tmp_path / "run", last_step=40, ending=None)
    before = read_page(run).visible_text()
    with open(run / "log.jsonl", "a") as log:
        log.write('{"step": 41, "lo')
    assert read_page(run).visible_text() == before


def test_a_run_without_any_step(tmp_path):
    page = read_page(make_run(tmp_path / "run", last_step=0, evaluate_every=None, ending=None))
    assert page.one("h1").text == "No step yet"
    assert "No finite value to draw." in page.by_id("curves").text and no_bare_nan(page)


def test_only_the_config_is_needed(tmp_path):
    run = make_run(tmp_path / "run")
    for name in ("dataset.json", "optimizer.txt", "log.jsonl", "evaluations.jsonl", "finished.json"):
        (run / name).unlink()
    assert read_page(run).one("h1").text == "No step yet"


def test_a_run_that_diverged_says_why_and_crosses_its_curves(tmp_path):
    reason = "the gradient norm was <b>not finite</b> in 7 steps in a row"
    run = make_run(tmp_path / "run", last_step=66, lost_from=60, ending=reason)
    page = read_page(run)
    assert page.one("h1").text == "Diverged after 66 of 120 steps"
    lede = page.one("p", "lede").text
    assert f"Why it ended: {reason}." in lede and "7 steps were skipped" in lede
    assert len(page.all("svg", "cross")) == 4  # loss and gradient norm, by steps and by seconds
    assert page.by_id("curves").text.count("not finite") == 2 * 7
    assert no_bare_nan(page)


def test_skipped_steps_are_counted_listed_and_no_kind_of_their_own(tmp_path):
    run = make_run(tmp_path / "run", skipped=(50, 51))
    page = read_page(run)
    assert "2 steps were skipped" in page.one("p", "lede").text
    title = next(e for e in page.all("summary") if e.text == "Skipped steps")
    assert [e.text for e in page.all("th", inside=title.parents[-1]) if e.attributes["scope"] == "row"] == ["50", "51"]
    assert [b.num_steps for b in breakdowns(read_run(run))] == [120, 40, 78]
    assert no_bare_nan(page)


def test_adamw_has_one_kind_of_step_and_no_phases_of_muon(tmp_path):
    page = read_page(make_run(tmp_path / "run", optimizer="adamw", scored=False))
    text = page.by_id("cost").text
    assert "AdamW and other" in text and "Newton-Schulz" not in text and "Row step" not in text
    assert page.one("table", "phases").attributes["style"] == "--columns:1"
    assert "score-by-step" not in charts_of(page) and "val-by-step" in charts_of(page)


def test_records_without_phases_count_them_as_rest(tmp_path):
    """The records of a comparison's runs from before phases were kept."""
    run = make_run(tmp_path / "run")
    keys = ("step", "loss", "seconds", "optimizer_seconds", "kind")
    rows = [{key: row[key] for key in keys} for row in rows_of(run, "log")]
    (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    every = breakdowns(read_run(run))[0]
    assert {key for key, seconds in every.parts.items() if seconds > 0} == {"other", "rest"}
    assert no_bare_nan(read_page(run))


# ------------------------------------------------------------------------------------- which kind of folder, and errors
def test_the_folder_decides_which_page_is_made(tmp_path, capsys):
    folders = {"Training run": make_run(tmp_path / "run"), "Comparison": make_study(tmp_path / "study")}
    for kind, folder in folders.items():
        assert report_command.run([str(folder)]) == 0
        assert capsys.readouterr().out.strip() == str(folder / "report.html")
        assert Page((folder / "report.html").read_text()).one("p", "eyebrow").text.startswith(kind)


def test_a_folder_that_is_neither_gives_one_clear_line(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(StudyError) as error:
            write_report(folder)
        assert str(folder) in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(StudyError, match=r"rowdit train.*config\.json"):
        write_report(tmp_path)


def test_an_unfinished_comparison_points_to_its_runs(tmp_path):
    make_run(tmp_path / "runs" / "muon-seed0")
    with pytest.raises(StudyError, match="rowdit report .*/runs/muon-seed0`"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{}", r"config\.json: no key 'train'"),
        ("config.json", "{", r"config\.json isn't JSON"),
        ("log.jsonl", '{"step": 1, "loss": 1.0, "seconds": 1.0}', r"log\.jsonl: the row of step 1 has no key 'kind'"),
        ("evaluations.jsonl", '{"step": "x"}', r"evaluations\.jsonl, row 1: step is 'x', not a number"),
        ("finished.json", "[]", r"finished\.json should be an object, but is list"),
    ],
)
def test_what_is_malformed_is_named(run, name, content, message):
    (run / name).write_text(content + "\n")
    with pytest.raises(StudyError, match=message):
        write_report(run)
    assert not (run / "report.html").exists()
