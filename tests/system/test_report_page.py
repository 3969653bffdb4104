"""The report page in a real browser: phone and wide screen, light and dark, with and without scripts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from headless_chromium import Browser, find_chromium
from rowdit.study.report import write_report
from synthetic_run import make_run
from synthetic_study import make_study

PHONE, WIDE = 390, 1440
LIVE_PANELS = "[...document.querySelectorAll('.panel')].map(p => getComputedStyle(p).display !== 'none')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium or Chrome is installed: the page isn't looked at in a browser")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages with a blank")
    long_name = "an_optimizer_with_a_name_that_is_longer_than_a_phone_is_wide_" * 2
    studies = {
        "usual": make_study(folder / "usual"),
        "seeds": make_study(folder / "seeds", seeds=(0, 1, 2)),
        "odd": make_study(folder / "odd", optimizers=("adamw", "muon", long_name, "d", "e"), diverges={"muon": 20}),
    }
    runs = {
        "run": make_run(folder / "run", skipped=(50,)),
        "going": make_run(folder / (long_name * 2)[:200], last_step=40, evaluate_every=None, ending=None),
    }
    return {name: write_report(out) for name, out in (studies | runs).items()}


def open_page(browser: Browser, path: Path, **how) -> None:
    browser.open(path.as_uri(), **how)


def click(browser: Browser, selector: str) -> None:
    """A click where the element is, so that what covers it, or hides it, counts."""
    browser.evaluate(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
    x, y = center(browser, selector)
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


def center(browser: Browser, selector: str) -> tuple[float, float]:
    box = browser.evaluate(
        f"(b => [b.x + b.width / 2, b.y + b.height / 2])(document.querySelector({selector!r}).getBoundingClientRect())"
    )
    return box[0], box[1]


def press(browser: Browser, key: str) -> None:
    codes = {"ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}
    for kind in ("rawKeyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])


@pytest.mark.parametrize("name", ["usual", "seeds", "odd", "run", "going"])
@pytest.mark.parametrize("width, dark", list(itertools.product((PHONE, WIDE), (False, True))))
def test_the_page_loads_alone_without_complaint_and_fits(browser, pages, name, width, dark):
    open_page(browser, pages[name], width=width, dark=dark)
    assert browser.evaluate("document.readyState") == "complete"

    requests = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    files = {unquote(urlparse(url).path) for url in requests if not url.startswith("data:")}
    assert files == {str(pages[name])}
    complaints = [
        e
        for e in browser.events
        if e["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    ]
    assert complaints == []

    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    # What is wider than the screen scrolls in its own place, and nothing else is.
    outside = browser.evaluate(
        "[...document.body.querySelectorAll('*')].filter(e => !e.closest('.scroll, .vh') && !e.closest('svg'))"
        f".filter(e => e.getBoundingClientRect().right > {width} + 1).map(e => e.tagName + '.' + e.className)"
    )
    assert outside == []
    broken = browser.evaluate("[...document.images].filter(i => i.complete && i.naturalWidth === 0).length")
    assert broken == 0


@pytest.mark.parametrize("name", ["usual", "run"])
@pytest.mark.parametrize("width", [PHONE, WIDE])
def test_labels_of_the_axes_stay_in_their_chart(browser, pages, name, width):
    open_page(browser, pages[name], width=width)
    outside = browser.evaluate(
        "[...document.querySelectorAll('.chart text')].filter(t => t.getBoundingClientRect().width > 0).filter(t => {"
        "const t1 = t.getBoundingClientRect(), c = t.closest('.chart').getBoundingClientRect();"
        "return t1.left < c.left || t1.right > c.right || t1.top < c.top || t1.bottom > c.bottom})"
        ".map(t => t.textContent)"
    )
    assert outside == []
    sizes = browser.evaluate(
        "[...new Set([...document.querySelectorAll('.tick')].map(t => getComputedStyle(t).fontSize))]"
    )
    assert sizes == ["12px"]


def luminance(rgb: list[int]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: list[int], b: list[int]) -> float:
    """Contrast ratio of WCAG 2.2, 1 to 21."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_both_colour_schemes_are_readable_and_differ(browser, pages):
    """WCAG AA: 4.5 for text, 3 for lines."""
    papers = []
    for dark in (False, True):
        open_page(browser, pages["usual"], width=WIDE, dark=dark)
        names = ["paper", "panel", "soft", "lead", "ink", "muted", *(f"s{i}" for i in range(6))]
        values = browser.evaluate(
            f"(names => {{const out = {{}}, probe = document.body.appendChild(document.createElement('i'));"
            "for (const n of names) {probe.style.color = `var(--${n})`;"
            "out[n] = getComputedStyle(probe).color.match(/\\d+/g).map(Number)} return out})"
            f"({json.dumps(names)})"
        )
        papers.append(values["paper"])
        for ground in ("paper", "panel"):
            assert contrast(values["ink"], values[ground]) >= 7
            assert contrast(values["muted"], values[ground]) >= 4.5
            assert all(contrast(values[f"s{i}"], values[ground]) >= 3 for i in range(6))
        assert contrast(values["muted"], values["lead"]) >= 4.5
        assert browser.evaluate("getComputedStyle(document.body).color.match(/\\d+/g).map(Number)") == values["ink"]
    assert luminance(papers[0]) > 0.8 and luminance(papers[1]) < 0.05


@pytest.mark.parametrize("scripts", [True, False])
def test_steps_and_axes_are_chosen_with_and_without_scripts(browser, pages, scripts):
    open_page(browser, pages["usual"], width=PHONE, scripts=scripts)
    displays = "['.by-step', '.by-time'].map(s => getComputedStyle(document.querySelector(s)).display)"
    assert browser.evaluate(displays) == ["grid", "none"]
    click(browser, "label[for=axis-time]")
    assert browser.evaluate(displays) == ["none", "grid"]
    assert browser.evaluate(LIVE_PANELS) == [False, False, False, True]
    click(browser, "label[for=sample-1]")
    assert browser.evaluate(LIVE_PANELS) == [False, True, False, False]
    press(browser, "ArrowLeft")
    assert browser.evaluate(LIVE_PANELS) == [True, False, False, False]


def test_the_page_of_a_run_shows_one_step_and_one_axis_at_a_time(browser, pages):
    open_page(browser, pages["run"], width=PHONE, scripts=False)
    displays = "['.by-step', '.by-time'].map(s => getComputedStyle(document.querySelector(s)).display)"
    click(browser, "label[for=axis-time]")
    assert browser.evaluate(displays) == ["none", "grid"]
    assert browser.evaluate(LIVE_PANELS) == [False, False, False, False, True]
    click(browser, "label[for=sample-0]")
    assert browser.evaluate(LIVE_PANELS) == [True, False, False, False, False]
    # The bar of a step is as long as its parts together, and the longest fills its place.
    lengths = browser.evaluate(
        "[...document.querySelectorAll('.stack')].map(s => [...s.children].reduce("
        "(sum, b) => sum + b.getBoundingClientRect().width, 0) / s.getBoundingClientRect().width)"
    )
    assert len(lengths) == 3 and max(lengths) == pytest.approx(1, abs=0.01)
    assert lengths[1] == max(lengths) and lengths[2] == min(lengths)


def test_values_show_under_the_pointer_and_the_arrow_keys(browser, pages):
    open_page(browser, pages["usual"], width=WIDE)
    browser.evaluate("document.querySelector('.by-step .plot').scrollIntoView({block: 'center', behavior: 'instant'})")
    assert browser.evaluate("document.querySelector('.tip')") is None
    x, y = center(browser, ".by-step .plot")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    rows = "[...document.querySelectorAll('.tip p')].map(p => [...p.children].map(s => s.textContent))"
    shown = browser.evaluate(rows)
    evaluations = pages["usual"].parent / "runs" / "muon-seed0" / "evaluations.jsonl"
    scores = {row["step"]: row["score_report"] for row in map(json.loads, evaluations.read_text().splitlines())}
    assert shown[0] == ["step", "30"] and [row[0] for row in shown[1:]] == ["AdamW", "Muon", "Periodic"]
    assert float(shown[2][1]) == pytest.approx(scores[30], rel=1e-3)
    series = browser.evaluate("JSON.parse(document.querySelector('.by-time .plot').dataset.chart).series")
    click(browser, "label[for=axis-time]")
    browser.evaluate("document.querySelector('.by-time .plot').focus()")
    press(browser, "ArrowLeft")  # the last time of all, which only the slowest run reaches
    slowest = max(range(3), key=lambda index: series[index]["x"][-1])
    assert [index for index, row in enumerate(browser.evaluate(rows)[1:]) if "(at " not in row[1]] == [slowest]
    click(browser, "label[for=axis-step]")
    browser.evaluate("document.querySelector('.by-step .plot').focus()")
    press(browser, "ArrowRight")
    press(browser, "ArrowRight")
    assert browser.evaluate(rows)[0] == ["step", "30"]
    inside = browser.evaluate(
        "(t => t.left >= 0 && t.right <= innerWidth)(document.querySelector('.tip').getBoundingClientRect())"
    )
    assert inside
    press(browser, "Escape")
    assert browser.evaluate("document.querySelector('.tip')") is None


def test_an_injected_script_would_not_run(browser, tmp_path):
    """Were there a hole in the escaping, the page's security policy would still hold."""
    page = write_report(make_study(tmp_path))
    page.write_text(page.read_text().replace("</main>", "<script>document.title = 'injected'</script></main>"))
    open_page(browser, page, width=WIDE)
    assert "injected" not in browser.evaluate("document.title")
    assert any("Content Security Policy" in json.dumps(event) for event in browser.events)
