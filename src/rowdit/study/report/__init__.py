"""The page that a comparison ends with: `write_report` reads a comparison's folder and writes one self-contained file.

`page` puts it together; `data` reads the folder; `verdict`, `tables`, `curves` and `sections` make its parts; `charts`
draws lines and dots as SVG; `markup` and `formatting` are the small tools under them.
"""

from __future__ import annotations

from .data import StudyError
from .page import write_report

__all__ = ["StudyError", "write_report"]
