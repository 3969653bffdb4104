"""`rowdit report`: the page of a finished comparison again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from rowdit.commands.parsing import parse


@dataclass(frozen=True)
class ReportOptions:
    """Makes OUT/report.html again from the records of a finished comparison."""

    out: tyro.conf.Positional[Path]


def run(arguments: list[str]) -> int:
    options = parse("report", ReportOptions, arguments)
    from rowdit.study.report import write_report

    print(write_report(options.out))
    return 0
