"""`rowdit study`: sizes, optimizers, learning rates and seeds from one recipe; tables, and the headline's numbers."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from rowdit.commands.limits import check_processes
from rowdit.commands.outputs import check_folder, no_empty_folder
from rowdit.commands.parsing import fail, items_of, parse


@dataclass(frozen=True)
class StudyOptions:
    """Tunes each optimizer in each case, then trains what won on every seed, several runs side by side. Ctrl-C saves;
    the same command goes on, also after a kill. Under torchrun all ranks work on one run after another.

    Args:
        recipe: name of the study.
        data: where data sets lie that aren't in the package, as NAME=SOURCE: digits=folder:PATH emoji=folder:PATH.
        out: folder for the results; by default out/study-RECIPE.
        processes: runs at a time, one thread each.
        cases: keep to these, comma-separated; the rest runs when the command is called without.
        questions: keep to these, comma-separated.
        show: run nothing; print what was found so far, and make the page and the tables again.
        table: print the headline from this headline.json, and nothing else; no recipe is needed.
        measure_times: run nothing but a few steps of each headline setting, one after another on an idle machine, and
            write their times beside the headline.
        threads: processor threads for --measure-times; all cores by default.
    """

    recipe: tyro.conf.Positional[str] = ""
    data: tuple[str, ...] = field(default=())
    out: Path | None = None
    processes: int = 2
    cases: str | None = None
    questions: str | None = None
    show: bool = False
    table: Path | None = None
    measure_times: bool = False
    threads: int | None = None


def run(arguments: list[str]) -> int:
    options = parse("study", StudyOptions, arguments)
    from rich.console import Console

    from rowdit.train.config import ConfigError

    console = Console()
    if options.table is not None:
        from rowdit.study.headline_table import print_headline

        print_headline(options.table, console)
        return 0
    from rowdit.recipes.studies import STUDIES, load_study

    if not options.recipe:
        raise ConfigError(f"which study? There are: {', '.join(STUDIES)}; or --table FILE for a headline.json")
    study = load_study(options.recipe, parse_data(options.data))
    out = options.out or Path("out") / f"study-{options.recipe}"
    check_folder(out)
    check_processes("processes", options.processes)
    if options.measure_times:
        from rowdit.commands.parsing import set_threads
        from rowdit.study.times import measure_times

        set_threads(options.threads)
        print(measure_times(study, out, console))
        return 0
    from rowdit.models.parallel import ParallelConfig
    from rowdit.study.markdown import write_markdown
    from rowdit.study.page import write_page
    from rowdit.study.run import by_name, print_study, read_rows, run_study, write_tables
    from rowdit.study.staging import Part
    from rowdit.train.world import join_world

    part = Part(split("--cases", options.cases), split("--questions", options.questions))
    complete = True
    if not options.show:
        with no_empty_folder(out), join_world(ParallelConfig()) as world:
            complete = run_study(study, out, num_processes=options.processes, part=part, world=world, console=console)
            if not world.is_main:
                return 0
    rows = read_rows(out)
    write_tables(study, out, rows)
    print_study(study, out, console)
    tables = write_markdown(study, out, by_name(rows))
    print(f"numbers  {out / 'headline.json'}, {out / 'study.csv'}, {tables}\npage     {write_page(study, out)}")
    if not complete:
        return fail(f"stopped; everything is saved. To go on: {shlex.join(['rowdit', 'study', *arguments])}", 130)
    return 0


def split(option: str, text: str | None) -> tuple[str, ...] | None:
    """`"a, b"` as ("a", "b"); None stays None."""
    return None if text is None else tuple(items_of(option, text))


def parse_data(entries: tuple[str, ...]) -> dict[str, str]:
    """`("emoji=folder:x",)` as {"emoji": "folder:x"}.

    Raises:
        ConfigError: an entry that isn't NAME=SOURCE, or a name given twice.
    """
    from rowdit.train.config import ConfigError

    found: dict[str, str] = {}
    for entry in entries:
        name, equals, source = entry.partition("=")
        if not (name and equals and source):
            raise ConfigError(f"data {entry!r}: must be NAME=SOURCE, such as emoji=folder:PATH")
        if name in found:
            raise ConfigError(f"data {entry!r}: {name} was given before")
        found[name] = source
    return found
