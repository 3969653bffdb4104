"""One verb for every kind of folder: which kind it is decides which page is made."""

from __future__ import annotations

from pathlib import Path

from .page import write_comparison_report
from .reading import StudyError
from .run_page import write_run_report


def write_report(folder: Path) -> Path:
    """Writes `folder/report.html`, from what `rowdit compare` or `rowdit train` left in `folder`.

    Returns:
        The page's path. An earlier page is replaced only when the new one is complete.

    Raises:
        StudyError: the folder is neither, or a file or key in it is missing or malformed; the message names it.
        OSError: the page can't be written; nothing is left of the attempt.
    """
    folder = Path(folder)
    if (folder / "summary.json").exists():
        return write_comparison_report(folder)
    if (folder / "config.json").exists():
        return write_run_report(folder)
    raise StudyError(f"{folder}: {_why_not(folder)}")


def _why_not(folder: Path) -> str:
    if not folder.is_dir():
        return "is a file; give the folder of a run or of a comparison" if folder.exists() else "no such folder"
    finish = "finish the comparison with `rowdit compare` and the same `--out`"
    runs = sorted(path.parent for path in folder.glob("runs/*/config.json"))
    if runs:
        return f"summary.json doesn't exist; {finish}, or see one of its runs: `rowdit report {runs[0]}`"
    return (
        f"summary.json doesn't exist; {finish}. Nor is this the folder of a run of `rowdit train`, which has a "
        "config.json"
    )
