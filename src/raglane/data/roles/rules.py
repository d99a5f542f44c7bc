"""The rules by which columns get their roles: ordered lists, of which the first that fits decides.

A rule gets the facts of a table and the named columns, and returns a choice, a refusal, or None if
it does not fit. No file is read here, and no path is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raglane._utils.messages import argument, count_of, quote, quote_all
from raglane.data.records import Columns
from raglane.data.roles.facts import Facts

# Names of an id column, in lower case and in order of preference.
ID_NAMES = (
    *("id", "sequence_id", "series_id", "case_id", "sample_id", "uid", "unique_id", "item_id"),
    *("patient_id", "subject_id", "meter_id", "user_id", "session_id"),
    *("patient", "subject", "meter"),
)
# The same in a table whose rows may be elements.
ROW_ID_NAMES = (*ID_NAMES, "sequence", "series", "case")

# Among several candidates for the sequence or the label, the only one with one of these names is
# chosen.
ROLE_NAMES = {
    "sequence": ("sequence", "input_ids", "token_ids", "tokens", "words", "text", "sentence"),
    "label": ("label", "labels", "class", "target", "tags"),
}

# Names of a time column, in order of preference.
TIME_NAMES = ("time", "timestamp", "datetime", "date", "step", "timestep", "time_step", "t", "ds")
# Further ones, if no two elements of a sequence have the same entry.
PERIOD_NAMES = ("day", "month", "quarter", "year")
# Names of parts of a date: not the id of a series, even if there is one row for each and a time.
_CALENDAR = (*TIME_NAMES, *PERIOD_NAMES, "hour", "minute", "second", "week", "weekday", "dayofweek")

NO_TIME = "none"
"""The value of the option of the time column for rows that are in order."""

# The largest share of rows with a time that repeats, which are kept without an option.
MOST_REPEATED = 0.05


@dataclass(frozen=True)
class Choice:
    """The columns of a role, and the note about them; () if there is none."""

    names: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Refusal:
    """A table that has no reading, or several: the parts of a message, and its fix as arguments.

    ``fixes`` are values of arguments of Columns with which the table may be read.
    """

    got: str
    rule: str
    fix: str
    fixes: Mapping[str, str] = field(default_factory=dict)
    candidates: tuple[str, ...] = ()


class Rule(NamedTuple):
    """A rule: its name, and the function that decides."""

    name: str
    decide: Callable[[Facts, Columns], Choice | Refusal | None]


def first(rules: Iterable[Rule], facts: Facts, columns: Columns) -> Choice | Refusal | None:
    """Return what the first rule that fits decides."""
    for rule in rules:
        if (decision := rule.decide(facts, columns)) is not None:
            return decision
    return None


def option(name: str, value: str | None = None) -> str:
    """Write an argument of Columns, or its option, for a message."""
    return argument(name, value, of="Columns")


def parts_of(name: str, present: Iterable[str]) -> tuple[str, ...]:
    """Return the column of this name, or else its parts between commas."""
    if name in present:
        return (name,)
    return tuple(name.strip() for name in name.split(","))


def taken(columns: Columns) -> set[str | None]:
    """Return the columns that were named in another role than time."""
    ids = columns.id.split(",") if columns.id is not None else ()
    return {
        columns.label,
        columns.id,
        *(name.strip() for name in ids),
        *(columns.features or ()),
        *(columns.static or ()),
        *(columns.categorical or ()),
    }


def _absent(role: str, name: str, facts: Facts) -> Refusal:
    rule = f"a file with this column, but its columns are {quote_all(facts)}"
    return Refusal(f"no column {quote(name)}", rule, f"pass one of them as {option(role)}")


def _named(role: str, name: str, facts: Facts, note: str) -> Choice | Refusal:
    parts = parts_of(name, facts)
    missing = next((name for name in parts if name not in facts.columns), None)
    return Choice(parts, note) if missing is None else _absent(role, missing, facts)


# The id of a sequence, of a table whose rows are elements.


def _named_id(facts: Facts, columns: Columns) -> Choice | Refusal | None:
    return None if columns.id is None else _named("id", columns.id, facts, "")


def _usual_id(facts: Facts, columns: Columns) -> Choice | None:
    times = parts_of(columns.time, facts) if columns.time is not None else ()
    others = {
        *(columns.sequence, columns.label, *times),
        *(columns.features or ()),
        *(columns.static or ()),
    }
    for usual in ROW_ID_NAMES:
        for name in facts:
            if name.lower() == usual and name not in others:
                return Choice((name,), f"id column: {quote(name)} (by its name)")
    return None


def _panel(facts: Facts, columns: Columns) -> Choice | Refusal | None:
    """Take the column that makes its entries with a time that repeats unique."""
    for times in _time_candidates(facts, columns):
        repeated = facts.repeats(*times)
        if repeated <= MOST_REPEATED * facts.count:
            return None
        keys = series_columns(facts, columns, *times)
        name = " and ".join(map(quote, times))
        if len(keys) == 1 and len(keys[0]) == 1:
            note = f"id column: {quote(keys[0][0])} (with it no entry of {name} repeats)"
            return Choice(keys[0], note)
        if keys and (facts.are_dates(times[0]) or times[0].lower() in TIME_NAMES):
            return _repeated(facts, name, repeated, keys)
    return None


def _repeated(facts: Facts, time: str, repeated: int, keys: Sequence[tuple[str, ...]]) -> Refusal:
    got = f"{repeated:,} of {facts.count:,} rows with an entry of {quote(time)} that repeats"
    ids = [",".join(key) for key in keys]
    several = "" if len(ids) == 1 else f" (or one of {', '.join(ids[1:4])})"
    fix = f"name the ids of the series with {option('id', ids[0])}{several}"
    rule = "one series, or series with an id column"
    return Refusal(got, rule, fix, {"id": ids[0]})


def series_columns(
    facts: Facts, columns: Columns, *times: str, named: Sequence[str] = ()
) -> list[tuple[str, ...]]:
    """Return the sets of columns that may be the ids of series: with the time each row is unique.

    Columns of words come first; without one, those of as many whole numbers as a time repeats. A
    set includes the columns that were ``named`` as ids.
    """
    free = _may_be_ids(facts, columns, times)
    words = [*named, *(name for name in facts.words(free) if name not in named)]
    in_order = [name for name in facts if name in words]
    keys = [key for key in facts.keys(in_order, *times) if set(named) <= set(key)]
    if keys or named:
        return keys
    count = facts.most_alike(*times)
    whole = [name for name in free if facts.is_whole(name) and facts.different(name) == count]
    return [key for key in facts.keys(whole, *times) if len(key) == 1]


def _may_be_ids(facts: Facts, columns: Columns, times: Sequence[str]) -> list[str]:
    roles = {columns.label, *(columns.features or ()), *times}
    others = (*_CALENDAR, *ROLE_NAMES["label"])
    free = [name for name in facts if name not in roles and name.lower() not in others]
    return [name for name in free if not facts.are_dates(name)]


def _one_series(facts: Facts, columns: Columns) -> Choice | None:  # noqa: ARG001
    if columns.task != "forecast":
        return None
    return Choice((), "no id column: all rows are one series")


def _no_id(facts: Facts, columns: Columns) -> Refusal:  # noqa: ARG001
    got = f"no id column among {quote_all(facts)}"
    rule = f"a file with a column of ids, called {', '.join(ROW_ID_NAMES)}"
    texts = f"if each row is a text, name its column with {option('sequence')}"
    series = f"if all rows are one series, pass {option('task', 'forecast')}"
    fix = f"name it with {option('id')}; {texts}; {series}"
    return Refusal(got, rule, fix, {"task": "forecast"})


ID = (
    Rule("named", _named_id),
    Rule("usual name", _usual_id),
    Rule("a time repeats, and with this column it does not", _panel),
    Rule("one series, for a forecast", _one_series),
    Rule("none", _no_id),
)
"""The rules for the ids of sequences, in a table whose rows are elements."""


# The time, which orders the rows of a sequence.


def _time_candidates(facts: Facts, columns: Columns) -> list[tuple[str, ...]]:
    """Return the columns that may be the time: by their names, or the only one of dates."""
    if columns.time is not None:
        parts = parts_of(columns.time, facts)
        return [parts] if set(parts) <= set(facts) else []
    pair = _date_and_clock(facts, columns)
    if pair is not None:
        return [pair.names]
    free = [name for name in facts if name not in taken(columns)]
    usual = _called(facts, free, TIME_NAMES)
    periods = _called(facts, free, PERIOD_NAMES)
    dates = facts.dates(name for name in free if name not in (*usual, *periods))
    return [(name,) for name in (*usual, *periods, *(dates if len(dates) == 1 else ()))]


def _called(facts: Facts, free: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns with usual names, in the order of these, except columns of words."""
    fitting = [name for usual in names for name in free if name.lower() == usual]
    return [name for name in fitting if facts.have_digits(name)]


def _named_time(facts: Facts, columns: Columns) -> Choice | Refusal | None:
    if columns.time is None:
        return None
    if columns.time == NO_TIME and NO_TIME not in facts.columns:
        return Choice((), f"no time column ({option('time', NO_TIME)}): the rows are in order")
    parts = " and ".join(map(quote, parts_of(columns.time, facts)))
    return _named("time", columns.time, facts, f"time column: {parts}")


def _date_and_clock(facts: Facts, columns: Columns) -> Choice | None:
    free = [name for name in facts if name not in taken(columns)]
    clocks = [name for name in free if facts.are_clocks(name)]
    dates = [name for name in free if name not in clocks and facts.are_dates(name)]
    if len(clocks) != 1 or len(dates) != 1:
        return None
    names = (dates[0], clocks[0])
    return Choice(
        names, f"time columns: {quote(names[0])} and {quote(names[1])} (a date and a time of day)"
    )


def time_rules(ids: tuple[str, ...]) -> tuple[Rule, ...]:
    """Return the rules for the time column of sequences with these id columns."""

    def usual(facts: Facts, columns: Columns) -> Choice | None:
        for name, *_ in _time_candidates(facts, columns):
            if name.lower() in TIME_NAMES and name not in ids:
                return Choice((name,), f"time column: {quote(name)} (by its name)")
        return None

    def period(facts: Facts, columns: Columns) -> Choice | None:
        for name, *_ in _time_candidates(facts, columns):
            is_free = name.lower() in PERIOD_NAMES and name not in ids
            if is_free and facts.is_unique(*ids, name):
                return Choice((name,), f"time column: {quote(name)} (by its name)")
        return None

    def only_dates(facts: Facts, columns: Columns) -> Choice | Refusal | None:
        named = {*taken(columns), *ids}
        dates = [
            name
            for name in facts
            if name not in named and facts.are_dates(name) and not facts.is_constant(name, *ids)
        ]
        if len(dates) == 1:
            return Choice((dates[0],), f"time column: {quote(dates[0])} (the only one of dates)")
        if not dates:
            return None
        got = f"{count_of(len(dates), 'column')} of dates, {quote_all(dates)}"
        fix = f"name one with {option('time', dates[0])}, or {option('time', NO_TIME)} if the rows are in order"
        return Refusal(got, "a file with one time column", fix, {"time": dates[0]})

    def none(facts: Facts, columns: Columns) -> Choice:
        why = ""
        for name in facts:
            if name in ids or name in taken(columns) or why:
                continue
            if name.lower() in TIME_NAMES and not facts.have_digits(name):
                why = f"{quote(name)} holds words; "
            elif name.lower() in PERIOD_NAMES:
                why = f"{quote(name)} has an entry twice in a sequence; "
        rest = f"rows keep the order of the file; name one with {option('time')}"
        return Choice((), f"no time column: {why}{rest}")

    return (
        Rule("named", _named_time),
        Rule("a date and a time of day", _date_and_clock),
        Rule("usual name", usual),
        Rule("a period of which no sequence has two", period),
        Rule("the only column of dates", only_dates),
        Rule("none", none),
    )
