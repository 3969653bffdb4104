"""The Markdown documents: links lead somewhere, Python examples run, commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)\s]*)?\)")
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?:^    |`)make ([a-z]+)\b", re.MULTILINE)

EXAMPLES = [
    pytest.param(
        match.group(1), id=f"{path.relative_to(ROOT)}:{path.read_text('utf-8')[: match.start()].count(chr(10)) + 1}"
    )
    for path in DOCUMENTS
    for match in EXAMPLE.finditer(path.read_text(encoding="utf-8"))
]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    for target, _ in LINK.findall(path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{name(path)}: {target} isn't there"


@pytest.mark.parametrize("code", EXAMPLES)
def test_python_examples_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "<example>", "exec"), {"__name__": "__main__"})


def test_make_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(COMMAND.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"compare", "test"} <= named
    assert named <= targets, f"README names {sorted(named - targets)}, which the Makefile lacks"
