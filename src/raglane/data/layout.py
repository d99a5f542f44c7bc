"""The layout of sequences: what all files of a dataset have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from typing import Any

from raglane.data.records import TASKS, Columns, Records, kinds_of
from raglane.errors import DataError, message, quote, quote_all


@dataclass(frozen=True)
class Layout:
    """What all shards have in common."""

    is_tokens: bool
    channels: tuple[str, ...]
    ids: str
    has_labels: bool
    has_tags: bool
    targets: str = "none"
    targets_per_element: bool = False
    target_names: tuple[str, ...] = ()
    features: tuple[tuple[str, bool, bool], ...] = ()
    label_kinds: tuple[str, ...] = ()

    @classmethod
    def of(cls, records: Records) -> Layout:
        """The layout of some records."""
        ids = "none"
        if records.ids is not None:
            ids = "numbers" if all(isinstance(name, int) for name in records.ids) else "texts"
        has_tags, targets = records.tags is not None, records.targets
        kind = "none" if targets is None else "numbers" if targets.is_numbers else "sets"
        return cls(
            records.is_tokens,
            records.channels,
            ids,
            records.labels is not None,
            has_tags,
            kind,
            targets is not None and targets.per_element,
            () if targets is None else targets.names,
            tuple((feature.name, feature.per_sequence, feature.is_numbers) for feature in records.features),
            _label_kinds(records),
        )

    @property
    def kind(self) -> str:
        """What the elements are, in words."""
        own = "tokens" if self.is_tokens else f"features ({quote_all(self.channels)})"
        return own if not self.features else f"{own} beside {quote_all(name for name, _, _ in self.features)}"

    def serves(self, task: str) -> bool:
        """Whether there are labels of the kind that a task learns."""
        wanted = TASKS[task]
        if wanted.label == "class":
            return self.has_tags if wanted.per == "element" else self.has_labels
        return wanted.label is None or self.targets == ("sets" if wanted.label == "set" else "numbers")

    def check(self, records: Records, first: str = "") -> None:
        """Refuse records of another layout; sequences without elements are of every kind."""
        found = Layout.of(records)
        if len(records.values) == 0:
            found = replace(found, is_tokens=self.is_tokens, channels=self.channels)
        if found == self:
            return
        if records.label_kinds is not None:
            check_labels(found.label_kinds, str(records.source), self.label_kinds, first)
        for name, here, before in (
            ("tokens or features", found.kind, self.kind),
            ("ids", found.ids, self.ids),
            ("labels per sequence", found.has_labels, self.has_labels),
            ("labels per element", found.has_tags, self.has_tags),
            ("targets", found.targets, self.targets),
            ("targets per element", found.targets_per_element, self.targets_per_element),
            ("numbers to learn", quote_all(found.target_names), quote_all(self.target_names)),
            ("features", quote(found.features), quote(self.features)),
        ):
            if here != before:
                got = f"{name}: {here} from {records.describe_row(0)} on, after {before}"
                rule = "all files, and all rows, are of one schema"
                fix = "convert what differs by itself, or make it alike"
                raise DataError(message(f"{records.source}", got, rule, fix))

    def to_config(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {**asdict(self), "channels": list(self.channels)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Layout:
        """The object that :meth:`to_config` described."""
        names = {name: tuple(config.get(name, ())) for name in ("channels", "target_names", "label_kinds")}
        return cls(**{**config, **names, "features": tuple(map(tuple, config.get("features", ())))})

    def names(self, columns: Columns) -> dict[str, str]:
        """What the columns of a shard are called, by their roles: as in the source, where that has names."""
        wanted = {"label": columns.label, "id": columns.id, "sequence": columns.sequence}
        if not (self.has_labels or self.has_tags or self.targets != "none"):
            del wanted["label"]
        if self.ids == "none":
            del wanted["id"]
        names: dict[str, str] = {}
        taken = {name for name, _, _ in self.features}
        for role, name in wanted.items():
            # A format without such columns may be told the name of another.
            free = [f"the {role}", role] if name is None else [f"the {role}", role, name]
            while free[-1] in names.values() or free[-1] in taken:
                free.pop()
            names[role] = free[-1]
        return names


def _label_kinds(records: Records) -> tuple[str, ...]:
    """What the labels of records were in their source: as it has them, or as they are written."""
    if records.label_kinds is not None:
        return records.label_kinds
    if records.targets is None:
        return kinds_of(records.labels or () if records.tags is None else records.tags.tolist())
    return () if records.targets.is_numbers else kinds_of(chain.from_iterable(records.targets.values))


def check_labels(kinds: tuple[str, ...], source: str, before: tuple[str, ...], first: str) -> None:
    """Refuse labels none of which is of a kind that those before are of: 1, "1" and 1.0 would be three, or one."""
    if kinds and before and not set(kinds) & set(before):
        got = f"labels that are {' and '.join(kinds)}, after {' and '.join(before)}"
        got += f" in {first}" if first and first != source else ""
        rule = "the labels of all files are of one kind"
        raise DataError(message(source, got, rule, "write them alike, or read the files one by one"))


def layout_in(description: Mapping[str, Any]) -> Layout:
    """The layout of a folder that was converted."""
    return Layout.from_config({field.name: description[field.name] for field in fields(Layout)})
