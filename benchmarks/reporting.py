"""What the benchmark scripts share: the command that made a result, and where results go.

Medians, tables, the machine and a DiT block's matrices are those of `rowdit bench`.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from rowdit.bench.machine import machine, machine_line
from rowdit.bench.shapes import Matrix, dit_matrices
from rowdit.bench.spread import Spread, table

__all__ = [
    "RESULTS",
    "Matrix",
    "Spread",
    "command_line",
    "dit_matrices",
    "machine",
    "machine_line",
    "table",
    "write_results",
]

RESULTS = Path(__file__).resolve().parent / "results"


def command_line() -> str:
    """The command that made the result, with the script's path relative to the repository."""
    script = Path(sys.argv[0]).resolve()
    root = RESULTS.parent.parent
    shown = script.relative_to(root) if script.is_relative_to(root) else Path(script.name)
    return shlex.join(["python", str(shown), *sys.argv[1:]])


def write_results(stem: Path, data: Mapping[str, object], markdown: str) -> None:
    """Writes ``stem``.json and ``stem``.md."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    stem.with_suffix(".md").write_text(markdown.rstrip() + "\n")
    print(f"wrote {stem.with_suffix('.json')} and .md")
