"""`rowdit report`: the page of a comparison or of a run, from its records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from rowdit.commands.parsing import parse


@dataclass(frozen=True)
class ReportOptions:
    """Makes OUT/report.html from the records in OUT: of a finished comparison, or of a run of `rowdit train`, which may
    have finished or diverged, been interrupted, or still be under way.

    Args:
        out: folder of the comparison or of the run.
    """

    out: tyro.conf.Positional[Path]


def run(arguments: list[str]) -> int:
    options = parse("report", ReportOptions, arguments)
    from rowdit.study.report import write_report

    print(write_report(options.out))
    return 0
