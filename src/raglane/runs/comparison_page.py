"""The page of ``raglane compare -o runs.html`` and of ``raglane tune``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raglane._utils.messages import count_of
from raglane._utils.table import PrintedTable
from raglane._utils.words import seconds_in_words
from raglane.native import machine
from raglane.report.figures import MEASURES, Compared, losses_svg, rows_svg, setting_svg
from raglane.report.page import Block, Heading, Page, Part, picture

# The most settings that are drawn.
_SETTINGS = 12
# The fewest runs for which settings are drawn.
_FEWEST = 3


def comparison_page(groups: Sequence[Compared], kind: str, name: str) -> bytes:
    """Return a comparison of runs as an HTML page."""
    runs = sum(len(group.rows) for group in groups)
    seconds = sum(sum(group.column("seconds", whole=True)) for group in groups)
    facts = [("runs", f"{runs:,}"), ("training time", seconds_in_words(seconds))]
    sentence = f"{count_of(runs, 'run')} in {count_of(len(groups), 'group')} of one data set, task and loss each."
    if len(groups) == 1:
        drawn = groups[0].drawn.replace("_", " ")
        best = groups[0].column(groups[0].drawn)[0]
        facts += [
            (f"best {drawn}", "-" if best is None else f"{best:.4f}"),
            ("best run", groups[0].names[0]),
        ]
        sentence = f"{groups[0].caption}. The best is {groups[0].names[0]}."
    version = machine.facts(())["raglane"]
    page = Page(
        kind=kind,
        name=name,
        sentence=sentence,
        facts=facts,
        parts=[
            Part(group.caption, _blocks(group, f"g{number}"), f"g{number}", True)
            for number, group in enumerate(groups)
        ],
        footer=f"Written by raglane {version}.",
        version=version,
    )
    return page.html()


def _results_first(group: Compared) -> PrintedTable:
    """Return the table of runs with settings last: a narrow screen shows the results at once."""
    columns = [name for name in group.columns if name not in group.settings]
    places = [group.columns.index(name) for name in (*columns, *group.settings)]
    return replace(
        group,
        caption="The best run is first",
        columns=[group.columns[place] for place in places],
        rows=[tuple(row[place] for place in places) for row in group.rows],
    )


def _blocks(group: Compared, prefix: str) -> list[Block]:
    """Return the table and the pictures of comparable runs."""
    drawn = group.drawn.replace("_", " ")
    result = rows_svg(group.names, group.column(group.drawn), drawn, are_dots=True)
    blocks: list[Block] = [
        _results_first(group),
        Heading("Results"),
        picture(result, f"{prefix}r", f"{drawn} of each run.", ""),
    ]
    for column, label in MEASURES.items():
        costs = rows_svg(group.names, group.column(column), label)
        blocks.append(picture(costs, f"{prefix}{column}", f"{label} of each run.", ""))
    epochs = "The validation loss, or the training loss without validation data."
    blocks += [
        Heading("Losses and settings"),
        picture(losses_svg(group), f"{prefix}l", "Loss by epoch.", epochs),
    ]
    for number, name in enumerate(group.settings[:_SETTINGS] if len(group.rows) >= _FEWEST else ()):
        caption = "" if number else "The best run has another colour."
        blocks.append(
            picture(setting_svg(group, name), f"{prefix}s{number}-", f"{drawn} by {name}.", caption)
        )
    return blocks
