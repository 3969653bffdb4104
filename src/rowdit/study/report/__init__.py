"""Pages of comparisons and of runs: `write_report` reads a folder and writes one self-contained file into it.

A comparison's: `page` puts it together, `data` reads the folder, `verdict`, `tables`, `curves` and `sections` make its
parts. A run's: `run_page`, `run_data`, `run_curves`, `run_phases`. Both: `shell` is the page around them, `parts` what
they have in common, `charts` draws lines and dots as SVG, `reading`, `markup` and `formatting` are the small tools.
"""

from __future__ import annotations

from .reading import StudyError
from .write import write_report

__all__ = ["StudyError", "write_report"]
