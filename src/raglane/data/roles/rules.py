"""The rules by which columns get their roles: ordered lists, of which the first that fits decides.

A rule gets the facts of a table and the named columns, and returns a choice, a refusal, or None if
it does not fit. No file is read here, and no path is known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from raglane._utils.messages import argument, count_of, quote, quote_all
from raglane.data.columns import LISTS, Columns, option
from raglane.data.roles.facts import Facts
from raglane.data.typed.names import (
    CALENDAR_NAMES,
    NO_TIME,
    PERIOD_NAMES,
    ROLE_NAMES,
    ROW_ID_NAMES,
    TIME_NAMES,
    TOKEN_NAMES,
)

# The largest share of rows with a time that repeats, which are kept without an option.
MOST_REPEATED = 0.05


@dataclass(frozen=True)
class RoleColumns:
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
    # Whether no column has the type that the task needs, so that another task may fit.
    is_unfit: bool = False


class RoleRule(NamedTuple):
    """A rule: its name, and the function that decides."""

    name: str
    decide: Callable[[Facts, Columns], RoleColumns | Refusal | None]


def first(
    rules: Iterable[RoleRule], facts: Facts, columns: Columns
) -> RoleColumns | Refusal | None:
    """Return what the first rule that fits decides."""
    for rule in rules:
        if (decision := rule.decide(facts, columns)) is not None:
            return decision
    return None


def parts_of(name: str, present: Iterable[str]) -> tuple[str, ...]:
    """Return the column of this name, or else its parts between commas."""
    if name in present:
        return (name,)
    return tuple(name.strip() for name in name.split(","))


def with_parts(columns: Columns, present: Collection[str]) -> Columns:
    """Return columns in which a listed name that no column has is its parts between commas."""
    changes: dict[str, Any] = {}
    for role in LISTS:
        names: tuple[str, ...] = getattr(columns, role) or ()
        parts = tuple(part for name in names for part in parts_of(name, present))
        if parts != names:
            changes[role] = parts
    return replace(columns, **changes) if changes else columns


def taken(columns: Columns) -> set[str | None]:
    """Return the columns that were named in another role than time and sequence."""
    ids = columns.id.split(",") if columns.id is not None else ()
    return {
        columns.label,
        columns.id,
        *(name.strip() for name in ids),
        *(columns.features or ()),
        *(columns.static or ()),
        *(columns.categorical or ()),
    }


def absent(role: str, name: str, present: Iterable[str], count: int = 1) -> Refusal:
    """Return the refusal of a column, one of ``count`` named in a role, that a table lacks."""
    rule = f"a file with this column, but its columns are {quote_all(present)}"
    fix = "pass one of them as"
    if role == "label":
        fix = "add it, use data without labels only to predict, or name another with"
    elif count > 1:
        fix = f"rename one, or name all {count} columns in their order, each with"
    return Refusal(f"no column {quote(name)}", rule, f"{fix} {option(role)}")


def _named(role: str, name: str, facts: Facts, note: str) -> RoleColumns | Refusal:
    parts = parts_of(name, facts)
    missing = next((name for name in parts if name not in facts.columns), None)
    return RoleColumns(parts, note) if missing is None else absent(role, missing, facts)


def takes_tokens(columns: Columns, name: str) -> tuple[bool, str]:
    """Return True if the whole numbers of a column are tokens, and the note about it."""
    is_tokens = columns.tokens
    if is_tokens is None:
        is_tokens = (
            columns.task == "language"
            or name.lower() in TOKEN_NAMES
            or name in (columns.categorical or ())
        )
    kind = "tokens" if is_tokens else "numbers"
    return is_tokens, f"the whole numbers of {quote(name)} are {kind} ({option('tokens')} chooses)"


def only(
    role: str, candidates: Sequence[str], kind: str, present: Iterable[str]
) -> RoleColumns | Refusal:
    """Choose the only candidate for the column of a role, or the only one with a usual name."""
    if len(candidates) == 1:
        return RoleColumns(
            tuple(candidates), f"{role} column: {quote(candidates[0])} (the only candidate)"
        )
    usual = tuple(name for name in candidates if name.lower() in ROLE_NAMES[role])
    if len(usual) == 1:
        return RoleColumns(usual, f"{role} column: {quote(usual[0])} (by its name)")
    if candidates:
        got = f"{len(candidates)} candidates for the {role} column: {quote_all(candidates)}"
        rule = f"a file with one candidate for the {role} column"
        fixes = {role: candidates[0]}
        return Refusal(got, rule, f"name one with {option(role)}", fixes, tuple(candidates), True)
    got = f"no candidate for the {role} column among its columns ({quote_all(present) or 'none'})"
    names = f"{option('id')} and {option('features')}"
    more = {"sequence": f"bytes and objects are no sequences; if rows are elements, pass {names}"}
    forecast = argument("task", "forecast")
    more["label"] = f"without labels, pass {forecast} to predict the next element"
    fix = f"add one, or name it with {option(role)}; {more[role]}"
    fixes = {"task": "forecast"} if role == "label" else {}
    return Refusal(got, f"data with a {kind}", fix, fixes, is_unfit=True)


def empty_label(name: str) -> Refusal:
    """Return the refusal of a column with the name of a label that is empty in all rows."""
    got = f"the column {quote(name)}, which is empty in all rows"
    fix = f"fill it, or name another one with {option('label')}"
    forecast = argument("task", "forecast")
    fix = f"{fix}; without labels, pass {forecast} to predict the next element"
    return Refusal(got, "data with a label in each row", fix)


class Features(NamedTuple):
    """The columns that were named as features of elements and of sequences."""

    of_elements: tuple[str, ...]
    of_sequences: tuple[str, ...]


def named_features(columns: Columns, present: Sequence[str]) -> Features | Refusal:
    """Return the named features, or why a name has no column or two roles."""
    for several in LISTS:
        names = getattr(columns, several) or ()
        missing = next((name for name in names if name not in present), None)
        if missing is not None:
            return absent(several, missing, present, len(names))
    others = {
        "features": columns.features or (),
        "sequence": (columns.sequence,),
        "label": (columns.label,),
    }
    for name in columns.static or ():
        role = next((role for role, names in others.items() if name in names), None)
        if role is not None:
            got = f"{quote(name)} as {option('static')} and as {option(role)}"
            rule = "a file with one role per column"
            return Refusal(got, rule, "leave one of the two out")
    unique = (tuple(dict.fromkeys(names or ())) for names in (columns.features, columns.static))
    return Features(*unique)


# The id of a sequence, of a table whose rows are elements.


def _named_id(facts: Facts, columns: Columns) -> RoleColumns | Refusal | None:
    return None if columns.id is None else _named("id", columns.id, facts, "")


def _usual_id(facts: Facts, columns: Columns) -> RoleColumns | None:
    return usual_id(columns, facts, ROW_ID_NAMES)


def usual_id(columns: Columns, eligible: Iterable[str], usual: Sequence[str]) -> RoleColumns | None:
    """Return the first eligible column with a usual name of ids."""
    eligible = list(eligible)
    times = parts_of(columns.time, eligible) if columns.time is not None else ()
    others = {
        *(columns.sequence, columns.label, *times),
        *(columns.features or ()),
        *(columns.static or ()),
    }
    free = {name.lower(): name for name in reversed(eligible) if name not in others}
    name = next((free[name] for name in usual if name in free), None)
    return None if name is None else RoleColumns((name,), f"id column: {quote(name)} (by its name)")


def _panel(facts: Facts, columns: Columns) -> RoleColumns | Refusal | None:
    """Take the column that makes its entries with a time that repeats unique."""
    for times in _time_candidates(facts, columns):
        repeated = facts.repeats(*times)
        if repeated <= MOST_REPEATED * facts.count:
            return None
        keys = series_columns(facts, columns, *times)
        name = " and ".join(map(quote, times))
        if len(keys) == 1 and len(keys[0]) == 1:
            note = f"id column: {quote(keys[0][0])} (with it no entry of {name} repeats)"
            return RoleColumns(keys[0], note)
        if keys and (facts.are_dates(times[0]) or times[0].lower() in TIME_NAMES):
            return _repeated(facts, name, repeated, keys)
    return None


def row_numbers(facts: Facts, columns: Columns, ids: tuple[str, ...]) -> Refusal | None:
    """Refuse a usual id that numbers the rows of series: of these, a time repeats."""
    if columns.id is not None or len(ids) != 1 or facts.count < 2 or not facts.is_unique(*ids):
        return None
    for times in _time_candidates(facts, columns):
        repeated = facts.repeats(*times)
        keys = []
        if repeated > MOST_REPEATED * facts.count:
            keys = [key for key in series_columns(facts, columns, *times) if ids[0] not in key]
        if keys:
            name = " and ".join(map(quote, times))
            return _repeated(facts, name, repeated, keys, f"{quote(ids[0])} for each row, but ")
    return None


def _repeated(
    facts: Facts, time: str, repeated: int, keys: Sequence[tuple[str, ...]], before: str = ""
) -> Refusal:
    rows = f"{repeated:,} of {facts.count:,} rows"
    got = f"{before}{rows} with an entry of {time} that repeats"
    ids = [",".join(key) for key in keys]
    several = "" if len(ids) == 1 else f" (or one of {', '.join(ids[1:4])})"
    fix = f"name the ids of the series with {option('id', ids[0])}{several}"
    rule = "one series, or series with an id column"
    return Refusal(got, rule, fix, {"id": ids[0]})


def series_columns(
    facts: Facts, columns: Columns, *times: str, named: Sequence[str] = ()
) -> list[tuple[str, ...]]:
    """Return the sets of columns that may be the ids of series: with the time each row is unique.

    Columns of words come first; without one, those of as many whole numbers as a time repeats; and
    then words with whole numbers. A set includes the columns that were ``named`` as ids.
    """
    free = _may_be_ids(facts, columns, times)
    words = [*named, *(name for name in facts.words(free) if name not in named)]
    in_order = [name for name in facts if name in words]
    keys = [key for key in facts.keys(in_order, *times) if set(named) <= set(key)]
    if keys or named:
        return keys
    return _numbered_series(facts, free, words if columns.duplicate_times is None else (), times)


def _numbered_series(
    facts: Facts, free: Sequence[str], words: Sequence[str], times: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return the whole numbers that may be ids of series: alone, or else with words."""
    count = facts.most_alike(*times)
    few = [name for name in free if facts.is_whole(name) and facts.different(name) <= count]
    as_many = [name for name in few if facts.different(name) == count]
    alone: list[tuple[str, ...]] = [key for key in facts.keys(as_many, *times) if len(key) == 1]
    if alone or not words:
        return alone
    keys = facts.keys([name for name in facts if name in (*words, *few)], *times)
    return [key for key in keys if set(words) & set(key)]


def _may_be_ids(facts: Facts, columns: Columns, times: Sequence[str]) -> list[str]:
    roles = {columns.label, *(columns.features or ()), *times}
    others = (*CALENDAR_NAMES, *ROLE_NAMES["label"])
    free = [name for name in facts if name not in roles and name.lower() not in others]
    return [name for name in free if not facts.are_dates(name)]


def _one_series(facts: Facts, columns: Columns) -> RoleColumns | None:  # noqa: ARG001
    if columns.task != "forecast":
        return None
    return RoleColumns((), "no id column: all rows are one series")


def _no_id(facts: Facts, columns: Columns) -> Refusal:  # noqa: ARG001
    got = f"no id column among {quote_all(facts)}"
    rule = f"a file with a column of ids, called {', '.join(ROW_ID_NAMES[:7])}, ..."
    texts = f"if each row is a text, name its column with {option('sequence')}"
    series = f"if all rows are one series, pass {option('task', 'forecast')}"
    fix = f"name it with {option('id')}; {texts}; {series}"
    return Refusal(got, rule, fix, {"task": "forecast"})


ID = (
    RoleRule("named", _named_id),
    RoleRule("usual name", _usual_id),
    RoleRule("a time repeats, and with this column it does not", _panel),
    RoleRule("one series, for a forecast", _one_series),
    RoleRule("none", _no_id),
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


def _named_time(facts: Facts, columns: Columns) -> RoleColumns | Refusal | None:
    if columns.time is None:
        return None
    if columns.time == NO_TIME and NO_TIME not in facts.columns:
        return RoleColumns((), f"no time column ({option('time', NO_TIME)}): the rows are in order")
    parts = " and ".join(map(quote, parts_of(columns.time, facts)))
    return _named("time", columns.time, facts, f"time column: {parts}")


def _date_and_clock(facts: Facts, columns: Columns) -> RoleColumns | None:
    free = [name for name in facts if name not in taken(columns)]
    clocks = [name for name in free if facts.are_clocks(name)]
    dates = [name for name in free if name not in clocks and facts.are_dates(name)]
    if len(clocks) != 1 or len(dates) != 1:
        return None
    names = (dates[0], clocks[0])
    return RoleColumns(
        names, f"time columns: {quote(names[0])} and {quote(names[1])} (a date and a time of day)"
    )


def time_rules(ids: tuple[str, ...]) -> tuple[RoleRule, ...]:
    """Return the rules for the time column of sequences with these id columns."""

    def usual(facts: Facts, columns: Columns) -> RoleColumns | None:
        for name, *_ in _time_candidates(facts, columns):
            if name.lower() in TIME_NAMES and name not in ids:
                return RoleColumns((name,), f"time column: {quote(name)} (by its name)")
        return None

    def period(facts: Facts, columns: Columns) -> RoleColumns | None:
        for name, *_ in _time_candidates(facts, columns):
            is_free = name.lower() in PERIOD_NAMES and name not in ids
            if is_free and facts.is_unique(*ids, name):
                return RoleColumns((name,), f"time column: {quote(name)} (by its name)")
        return None

    def only_dates(facts: Facts, columns: Columns) -> RoleColumns | Refusal | None:
        named = {*taken(columns), *ids}
        dates = [
            name
            for name in facts
            if name not in named and facts.are_dates(name) and not facts.is_constant(name, *ids)
        ]
        if len(dates) == 1:
            return RoleColumns(
                (dates[0],), f"time column: {quote(dates[0])} (the only one of dates)"
            )
        if not dates:
            return None
        got = f"{count_of(len(dates), 'column')} of dates, {quote_all(dates)}"
        fix = f"name one with {option('time', dates[0])}, or {option('time', NO_TIME)} if the rows are in order"
        return Refusal(got, "a file with one time column", fix, {"time": dates[0]})

    def none(facts: Facts, columns: Columns) -> RoleColumns:
        why = ""
        for name in facts:
            if name in ids or name in taken(columns) or why:
                continue
            if name.lower() in TIME_NAMES and not facts.have_digits(name):
                why = f"{quote(name)} holds words; "
            elif name.lower() in PERIOD_NAMES:
                why = f"{quote(name)} has an entry twice in a sequence; "
        rest = f"rows keep the order of the file; name one with {option('time')}"
        return RoleColumns((), f"no time column: {why}{rest}")

    return (
        RoleRule("named", _named_time),
        RoleRule("a date and a time of day", _date_and_clock),
        RoleRule("usual name", usual),
        RoleRule("a period of which no sequence has two", period),
        RoleRule("the only column of dates", only_dates),
        RoleRule("none", none),
    )
