"""The report page, read back with an HTML parser and compared with the folder that it was made from."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from page_reader import Page, charts_of
from rowdit.evaluate.score import caution
from rowdit.study.report import StudyError, write_report
from rowdit.study.table import print_table
from synthetic_study import make_study


def read_page(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def read_summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def edit_summary(folder: Path, change) -> None:
    summary = read_summary(folder)
    change(summary)
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return make_study(tmp_path / "out")


def test_scores_from_too_few_images_are_marked_on_the_page_and_in_the_table(study):
    def few(summary: dict) -> None:
        for entry in summary["optimizers"].values():
            entry["fingerprint"] |= {"network": {"name": "effnet_lite0", "dim": 320}, "reference": {"num_images": 200}}
            entry |= {"caution": caution(entry["fingerprint"]), "diverged": {}}

    assert "Caution" not in write_report(study).read_text(encoding="utf-8")
    edit_summary(study, few)
    said = "Caution: 200 images of the reference are too few for a Frechet distance of 320 features"
    assert write_report(study).read_text(encoding="utf-8").count(said) == 1  # not once an optimizer
    console = Console(file=io.StringIO(), width=300)
    print_table(read_summary(study) | {"seeds": [0]}, console)
    assert console.file.getvalue().count(said) == 1


# ---------------------------------------------------------------------------------------------------------------------
# the file


def test_the_page_lies_beside_the_summary_and_is_well_formed(study):
    path = write_report(study)
    assert path == study / "report.html"
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>\n")
    page = Page(text)
    ids = [e.attributes["id"] for e in page.elements if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    for element in page.elements:
        named = (element.attributes.get("aria-labelledby") or "").split() + [element.attributes.get("for") or ids[0]]
        assert set(named) <= set(ids), element.attributes
        target = element.attributes.get("href") or ""
        if target.startswith("#"):
            assert target[1:] in ids


def test_nothing_outside_the_file_is_asked_for(study):
    text = write_report(study).read_text(encoding="utf-8")
    page = Page(text)
    for element in page.elements:
        for name in ("src", "srcset", "href", "action", "poster", "data", "xlink:href"):
            value = element.attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (element.tag, value)
    assert not re.search(r"url\(|@import|https?://", text)


def test_the_security_policy_allows_this_script_and_no_request(study):
    page = read_page(study)
    policy = next(
        e for e in page.all("meta") if e.attributes.get("http-equiv") == "Content-Security-Policy"
    ).attributes["content"]
    script_hash = base64.b64encode(hashlib.sha256(page.one("script").text.encode()).digest()).decode()
    assert f"script-src 'sha256-{script_hash}'" in policy
    assert "default-src 'none'" in policy


def test_equal_folders_give_equal_pages(tmp_path):
    first, second = (make_study(tmp_path / name, seeds=(0, 1)) for name in ("a", "b"))
    assert write_report(first).read_bytes() == write_report(second).read_bytes()


def test_a_page_that_cannot_be_made_leaves_the_old_one(study):
    old = write_report(study).read_bytes()
    (study / "runs" / "muon-seed0" / "log.jsonl").unlink()
    with pytest.raises(StudyError):
        write_report(study)
    assert (study / "report.html").read_bytes() == old
    assert sorted(p.name for p in study.iterdir()) == ["report.html", "runs", "summary.json"]


# ---------------------------------------------------------------------------------------------------------------------
# the verdict


def test_the_headline_names_the_winner_and_the_distance_from_adamw(study):
    optimizers = read_summary(study)["optimizers"]
    best = {name: entry["best"]["score"] for name, entry in optimizers.items()}
    assert min(best, key=best.get) == "periodic"
    percent = 100 * (1 - best["periodic"] / best["adamw"])
    headline = read_page(study).one("h1").text.replace("\u00a0", " ")
    assert headline == f"Periodic Row-wise Muon has the best score, {percent:.1f} % lower than AdamW’s"


def test_adamw_can_win(study):
    def swap(summary):
        entries = summary["optimizers"]
        for kind in ("best", "final", "at_fixed_step", "at_fixed_time"):
            entries["adamw"][kind]["score"] = 10.0
            entries["muon"][kind]["score"] = 12.5
            entries["periodic"][kind]["score"] = 20.0

    edit_summary(study, swap)
    headline = read_page(study).one("h1").text.replace("\u00a0", " ")
    assert headline == "AdamW has the best score, 20.0 % lower than Muon’s"


def test_one_seed_is_called_one_seed_and_a_close_call_close(study):
    def bring_together(summary):
        summary["optimizers"]["muon"]["best"]["score"] = summary["optimizers"]["periodic"]["best"]["score"] * 1.004

    lede = read_page(study).one("p", "lede").text
    assert "This is one seed" in lede and "too close to call" not in lede
    edit_summary(study, bring_together)
    page = read_page(study)
    assert "0.4\u00a0% higher, too close to call from one seed" in page.one("p", "lede").text
    assert "lower than AdamW’s" in page.one("h1").text  # AdamW is far away


def test_a_headline_from_one_seed_claims_no_win_that_is_too_close(study):
    def bring_together(summary):
        for entry, score in zip(summary["optimizers"].values(), (50.0, 50.5, 50.9), strict=True):
            entry["best"]["score"] = score

    edit_summary(study, bring_together)
    assert read_page(study).one("h1").text == "AdamW is just ahead of Muon, 50.00 to 50.50: too close to call"


def test_several_seeds_are_counted(tmp_path):
    study = make_study(tmp_path, seeds=(3, 4, 5))
    optimizers = read_summary(study)["optimizers"]
    ours, theirs = ([p["score"] for p in optimizers[n]["best"]["per_seed"]] for n in ("periodic", "muon"))
    if sum(ours) > sum(theirs):
        ours, theirs = theirs, ours
    wins = sum(a < b for a, b in zip(ours, theirs, strict=True))
    page = read_page(study)
    lede = page.one("p", "lede").text
    assert f"in {wins} of 3 seeds" in lede and "mean over 3 seeds" in lede and "one seed" not in lede
    spread = f"{min(ours):.2f} to {max(ours):.2f}"
    assert spread in page.one("ul", "cards").text


def test_a_lead_that_is_lost_at_the_end_is_told(study):
    edit_summary(study, lambda summary: summary["optimizers"]["muon"]["final"].update(score=1.25))
    assert "at the end Muon leads (1.250)" in read_page(study).one("p", "lede").text


def test_the_floor_and_the_selection_are_explained(study):
    about = read_page(study).all("p", "about")[0].text
    assert "12.30: the floor" in about and "fd_effnet_lite0" in about
    assert "chosen on one set of generated samples and scored on another" in about
    assert "(images 0 to 999 chose, images 1,000 to 1,999 scored)" in about


# ---------------------------------------------------------------------------------------------------------------------
# the tables


def table_rows(page: Page) -> list[list[str]]:
    table = page.one("table", "numbers")
    return [
        [cell.text for cell in page.elements if cell.tag in ("th", "td") and row in cell.parents]
        for row in page.all("tr", inside=table)
    ]


def test_the_table_has_all_four_numbers_of_every_optimizer(study):
    optimizers = read_summary(study)["optimizers"]
    rows, group = {}, ""
    for row in table_rows(read_page(study)):
        if len(row) == 1:
            group = row[0]
        rows[group, row[0]] = row[1:]
    titles = {"best": "Best", "at_fixed_step": "Fixed step", "at_fixed_time": "Fixed time", "final": "Final"}
    for kind, title in titles.items():
        for index, entry in enumerate(optimizers.values()):
            cell = rows["Score (fd_effnet_lite0)", title][index]
            assert cell.startswith(f"{entry[kind]['score']:.2f}")
            assert f"step {entry[kind]['step']}" in cell
            assert rows["Validation loss", title][index].startswith(f"{entry['val_loss'][kind]['score']:.4f}")
    seconds = [entry["time_to_adamw_best"] for entry in optimizers.values()]
    for cell, value in zip(rows["Score (fd_effnet_lite0)", "Time to AdamW’s best"], seconds, strict=True):
        assert float(cell.split("\u00a0")[0]) == pytest.approx(value, rel=5e-3)
    times = optimizers["periodic"]["optimizer_seconds_per_step"]
    for title, key in (("Optimizermean over a period", "mean"), ("Full stepof the optimizer", "refresh")):
        assert rows["Time per step", title][2].startswith(f"{1e3 * times[key]:.1f}\u00a0ms")
    assert rows["Time per step", "Row stepof the optimizer"][:2] == ["–", "–"]
    assert rows["Time per step", "Row stepof the optimizer"][2] == f"{1e3 * times['row']:.2f}\u00a0ms"
    share = 100 * optimizers["muon"]["optimizer_share"]
    assert rows["Time per step", "Shareof the optimizer"][1] == f"{share:.1f}\u00a0%"


def test_the_lowest_of_a_row_is_marked_and_no_other(study):
    page = read_page(study)
    best_row = next(row for row in page.all("tr") if page.all("th", inside=row)[0].text == "Best")
    leads = [cell.attributes.get("class") == "leads" for cell in page.all("td", inside=best_row)]
    assert leads == [False, False, True]


def test_what_differs_stands_apart_from_what_is_shared(study):
    page = read_page(study)
    settings = page.by_id("settings")
    table = page.all("table", "settings", inside=settings)[0]
    names = [th.text for th in page.all("th", inside=table) if th.attributes.get("scope") == "row"]
    assert names == ["lr", "momentum", "nesterov", "adjust_lr_fn", "period", "row_scale"]
    pairs = dict(zip((e.text for e in page.all("dt")), (e.text for e in page.all("dd")), strict=True))
    assert pairs["weight_decay"] == "0.01" and pairs["betas"] == "0.9, 0.95" and pairs["model.depth"] == "3"
    assert pairs["reference.sha256"] == "0123abcd" * 8


def test_fingerprints_that_differ_are_a_warning(study):
    assert not read_page(study).all("p", "warning")
    edit_summary(study, lambda summary: summary["optimizers"]["muon"]["fingerprint"].update(num_images=500))
    assert "can’t be compared" in read_page(study).one("p", "warning").text


def test_the_command_repeats_the_comparison(study):
    assert read_page(study).one("pre").text == "rowdit compare quickstart --optimizers adamw,muon,periodic --seeds 1"
    edit_summary(study, lambda summary: summary.update(config={"train": {"steps": 60}}))
    assert read_page(study).one("pre").text.endswith("--seeds 1 --steps 60")
    edit_summary(study, lambda summary: summary.update(command="rowdit compare other"))
    assert read_page(study).one("pre").text == "rowdit compare other"


# ---------------------------------------------------------------------------------------------------------------------
# curves and samples


def test_every_curve_is_drawn_against_steps_and_against_time(study):
    page = read_page(study)
    charts = charts_of(page)
    expected = {f"{what}-by-{axis}" for what in ("score", "val", "train") for axis in ("step", "seconds")}
    assert set(charts) == expected | {"optimizer-time"}
    rows = [json.loads(line) for line in (study / "runs/muon-seed0/evaluations.jsonl").read_text().splitlines()]
    for axis, column in (("step", "step"), ("seconds", "seconds")):
        muon = next(s for s in charts[f"score-by-{axis}"]["series"] if s["name"] == "Muon")
        assert muon["x"] == pytest.approx([row[column] for row in rows], rel=1e-5)
        assert [float(y) for y in muon["y"]] == pytest.approx([row["score_report"] for row in rows], rel=1e-3)
    for svg in page.all("svg"):
        if svg.attributes.get("role") == "img":
            assert page.one("title", inside=svg).text and "lowest" in page.one("desc", inside=svg).text


def test_time_is_the_sum_of_the_logged_steps(study):
    rows = [json.loads(line) for line in (study / "runs/adamw-seed0/log.jsonl").read_text().splitlines()]
    series = charts_of(read_page(study))["train-by-seconds"]["series"]
    adamw = next(s for s in series if s["name"] == "AdamW")
    assert adamw["x"][-1] == pytest.approx(sum(row["seconds"] for row in rows), rel=1e-4)


def test_full_and_row_steps_are_told_apart(study):
    series = {s["name"]: s for s in charts_of(read_page(study))["optimizer-time"]["series"]}
    assert set(series) == {"AdamW", "Muon, full step", "Periodic, full step", "Periodic, row step"}
    full, row = series["Periodic, full step"]["x"], series["Periodic, row step"]["x"]
    assert all((step - 1) % 3 == 0 for step in full) and all((step - 1) % 3 for step in row)
    assert sorted(full + row) == list(range(13, 61))  # the last 48 of 60 steps


def test_several_seeds_are_a_mean_among_faint_lines(tmp_path):
    study = make_study(tmp_path, seeds=(0, 1, 2), optimizers=("muon",))
    page = read_page(study)
    (series,) = charts_of(page)["score-by-step"]["series"]
    evaluations = [
        [json.loads(line) for line in (study / f"runs/muon-seed{seed}/evaluations.jsonl").read_text().splitlines()]
        for seed in (0, 1, 2)
    ]
    means = [sum(row["score_report"] for row in rows) / 3 for rows in zip(*evaluations, strict=True)]
    assert [float(y) for y in series["y"]] == pytest.approx(means, rel=1e-3)
    plot = page.all("div", "plot")[0]
    assert len(page.all("path", "faint", inside=plot)) == 3


def test_sample_grids_are_in_the_page_byte_for_byte(study):
    page = read_page(study)
    images = page.all("img")
    assert len(images) == 3 * 4
    files = [
        study / "runs" / f"{name}-seed0" / "samples" / f"step_{step:06d}.png"
        for step in (15, 30, 45, 60)
        for name in ("adamw", "muon", "periodic")
    ]
    for image, file in zip(images, files, strict=True):
        prefix, data = image.attributes["src"].split(",")
        assert prefix == "data:image/png;base64" and base64.b64decode(data) == file.read_bytes()
        assert (image.attributes["width"], image.attributes["height"]) == ("40", "30")
    assert [e.attributes["aria-label"] for e in page.all("input") if e.attributes["name"] == "sample"] == [
        f"Samples at step {step}" for step in (15, 30, 45, 60)
    ]


def test_samples_that_are_missing_or_broken_are_said_to_be(study):
    samples = study / "runs" / "muon-seed0" / "samples"
    (samples / "step_000015.png").unlink()
    (samples / "step_000030.png").write_bytes(b"GIF89a")
    (samples / "step_x.png").write_bytes(b"not ours")
    page = read_page(study)
    assert len(page.all("img")) == 10
    sentences = [e.text for e in page.all("p", "empty", inside=page.by_id("samples"))]
    assert sentences == ["No samples at this step.", "This file of samples isn’t a PNG image."]


# ---------------------------------------------------------------------------------------------------------------------
# runs that went wrong, and folders that can't be read


def test_a_run_that_diverged_is_shown_as_such(tmp_path):
    study = make_study(tmp_path, diverges={"muon": 20})
    page = read_page(study)
    assert "Muon diverged (seed 0: not finite from step 21)" in page.one("p", "lede").text
    cells = next(row for row in table_rows(page) if row[0] == "Final")
    assert cells[2] == "diverged" and not cells[1].startswith("diverged")
    assert len(page.all("svg", "cross")) == 6
    assert not re.search(r"\b(nan|inf|None)\b", page.visible_text(), re.IGNORECASE)


def test_the_reason_recorded_in_the_summary_is_told(study):
    edit_summary(study, lambda s: s["optimizers"]["muon"].update(diverged={"0": "no finite gradient <i>"}))
    assert "Muon diverged (seed 0: no finite gradient <i>)" in read_page(study).one("p", "lede").text


def test_a_page_without_any_finite_score(tmp_path):
    names = ("adamw", "periodic")
    page = read_page(make_study(tmp_path, optimizers=names, diverges=dict.fromkeys(names, 0)))
    assert page.one("h1").text == "No optimizer reached a finite score"
    assert "No finite value to draw." in page.by_id("curves").text
    assert not re.search(r"\b(nan|inf|None)\b", page.visible_text(), re.IGNORECASE)


@pytest.mark.parametrize("optimizers", [("periodic",), ("muon", "periodic"), ("adamw",), ("a", "b", "c", "d", "e")])
def test_any_set_of_optimizers_makes_a_page(tmp_path, optimizers):
    page = read_page(make_study(tmp_path, optimizers=optimizers))
    assert len(page.all("li", "card")) == len(optimizers)
    if "adamw" not in optimizers:
        assert "AdamW" not in page.one("h1").text
        assert "Time to AdamW’s best" not in page.one("table", "numbers").text


HOSTILE = "\"><script>alert(1)<img src=x onerror=alert(2)>'&amp;"


def test_names_and_values_cannot_become_elements(tmp_path):
    study = make_study(tmp_path, optimizers=("adamw", HOSTILE), recipe=HOSTILE)

    def poison(summary):
        summary["score_name"] = HOSTILE
        summary["machine"] = {HOSTILE: HOSTILE}
        for entry in summary["optimizers"].values():
            entry["settings"][HOSTILE] = {HOSTILE: [HOSTILE]}
            entry["fingerprint"][HOSTILE] = HOSTILE

    edit_summary(study, poison)
    page = read_page(study)
    assert len(page.all("script")) == 1
    assert {e.attributes["src"][:5] for e in page.all("img")} == {"data:"}
    assert not [e for e in page.elements for name in e.attributes if name.startswith("on")]
    assert HOSTILE in page.one("h1").text
    assert {s["name"] for s in charts_of(page)["score-by-step"]["series"]} == {"AdamW", HOSTILE}
    assert page.one("pre").text.startswith("rowdit compare '")  # quoted for the shell


def test_a_folder_without_summary_says_what_to_do(tmp_path):
    with pytest.raises(StudyError, match=r"summary\.json doesn't exist; .*rowdit compare"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    "remove, named",
    [
        (("floor",), "'floor'"),
        (("score_name",), "'score_name'"),
        (("optimizers", "muon", "final"), "'final'"),
        (("optimizers", "muon", "best", "seconds"), "'seconds'"),
        (("optimizers", "muon", "val_loss"), "'val_loss'"),
        (("optimizers", "muon", "optimizer_seconds_per_step", "mean"), "'mean'"),
        (("optimizers", "muon", "seeds"), "'seeds'"),
    ],
)
def test_a_missing_key_is_named_with_its_file(study, remove, named):
    def cut(summary):
        for key in remove[:-1]:
            summary = summary[key]
        del summary[remove[-1]]

    edit_summary(study, cut)
    with pytest.raises(StudyError) as error:
        write_report(study)
    assert str(study / "summary.json") in str(error.value) and f"no key {named}" in str(error.value)
    assert all(repr(key) in str(error.value) for key in remove[:-1])


def test_keys_that_nobody_knows_are_no_error(study):
    before = write_report(study).read_bytes()
    edit_summary(study, lambda s: s.update(news=1) or s["optimizers"]["muon"].update(news={"a": [1]}))
    log = study / "runs" / "muon-seed0" / "log.jsonl"
    rows = [json.loads(line) | {"news": 1} for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert write_report(study).read_bytes() == before


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".."])
def test_an_optimizer_that_points_out_of_the_folder_is_refused(study, name):
    edit_summary(study, lambda s: s["optimizers"].update({name: s["optimizers"]["muon"]}))
    with pytest.raises(StudyError, match="can't be the name of a run's folder"):
        write_report(study)


def test_a_broken_line_is_named_and_a_cut_last_line_left_out(study):
    log = study / "runs" / "muon-seed0" / "log.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines, '{"step": 61, "lo']))
    write_report(study)
    log.write_text("\n".join(["{broken", *lines]))
    with pytest.raises(StudyError, match=r"muon-seed0/log\.jsonl, line 1: not JSON"):
        write_report(study)
    row = json.loads(lines[0])
    del row["kind"]
    log.write_text("\n".join([json.dumps(row), *lines[1:]]) + "\n")
    with pytest.raises(StudyError, match=r"muon-seed0/log\.jsonl: the row of step 1 has no key 'kind'"):
        write_report(study)


@pytest.mark.parametrize("seeds", [[], "0", [0.5], None])
def test_seeds_that_are_none_are_named(study, seeds):
    edit_summary(study, lambda s: s["optimizers"]["muon"].update(seeds=seeds))
    with pytest.raises(StudyError, match="'seeds' should be a list of at least one integer"):
        write_report(study)


def test_numbers_written_as_text_are_read(study):
    """JSON has no NaN: the logs write "nan" and "inf"."""
    path = study / "runs" / "muon-seed0" / "evaluations.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1] |= {"score_report": "nan", "score_select": "inf", "kid": None}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    muon = charts_of(read_page(study))["score-by-step"]["series"][1]
    assert muon["name"] == "Muon" and len(muon["x"]) == 3
    assert not math.isnan(sum(float(y) for y in muon["y"]))
