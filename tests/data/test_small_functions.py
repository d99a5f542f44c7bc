"""Small functions of the data room, on the cases that say what they are for."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas
import pytest

from raglane.data.encoders import FeatureEncoder, encode, fit_vocabulary, look_up, places_of, sort_labels
from raglane.data.epochs import check_least
from raglane.data.formats.arrow import labels_in
from raglane.data.formats.base import (
    check_text,
    choose_column,
    columns_argument,
    data_error,
    decode,
    has_utf8,
    id_column,
    takes_tokens,
)
from raglane.data.formats.csv import repeats_ids
from raglane.data.formats.ipc import is_converted, is_sealed, seal, with_names
from raglane.data.formats.pieces import lines_of, skipped_lines
from raglane.data.fragments import Fragment, Layout
from raglane.data.lengths import Distribution, bins, buckets, summary
from raglane.data.missing import fill_missing, how_to_fill
from raglane.data.order.batches import assign_ranks, balance
from raglane.data.order.limit import BatchLimit, pieces_of, settle
from raglane.data.order.order import Permutation, descending_keys, key_of, shuffle, uniform
from raglane.data.reading import is_panel, is_text
from raglane.data.records import (
    Columns,
    Feature,
    Records,
    Skipped,
    Targets,
    check_features,
    joined,
    kinds_of,
    note_empty,
    offsets_of,
    place_of,
)
from raglane.data.splitting import characters_in, check_split, join_tokens, split_texts
from raglane.data.statistics import Channel, FeatureCounts
from raglane.data.stores import expand, is_url
from raglane.errors import ArgumentError, DataError


def test_encode() -> None:
    city = FeatureEncoder("city", True, vocabulary=("<unk>", "Bonn", "Rome"))
    there = Feature("city", np.array(["Rome", "Oslo"], dtype=object), per_sequence=True)
    assert (encode([city], [there], np.array([0, 1, 3]), "error", "data").tolist()) == [[2.0], [0.0], [0.0]]


def test_featureencoder() -> None:
    assert (FeatureEncoder("city", True, vocabulary=("<unk>", "Bonn", "Rome")).kind) == "categories per sequence"


def test_check_least() -> None:
    check_least("steps", 3, 1)
    with pytest.raises(ArgumentError, match=re.escape("steps must be at least 1, got 0. Pass 1 or more.")):
        check_least("steps", 0, 1)


def test_joined() -> None:
    ages = [(Feature("age", np.array([age], np.float32), per_sequence=True),) for age in (31, 58)]
    assert (joined(ages)[0].values.tolist()) == [31.0, 58.0]


def test_check_features() -> None:
    check_features((Feature("age", np.zeros(2, np.float32), per_sequence=True),), 2, 7)


def test_id_column() -> None:
    assert (id_column(Path("a.csv"), Columns(), ["x", "ID"], ["x", "ID"])) == ("ID", ("id column: 'ID' (by its name)",))


def test_choose_column() -> None:
    assert (choose_column(Path("a.csv"), "label", ["y"], "text column", ["id", "x", "y"])) == (
        "y",
        "label column: 'y' (the only candidate)",
    )


def test_takes_tokens() -> None:
    assert (takes_tokens(Columns(), "input_ids")) == (
        True,
        "the whole numbers of 'input_ids' are tokens (Columns(tokens=...) chooses)",
    )


def test_columns_argument() -> None:
    assert (columns_argument("label"), columns_argument("task", "tag")) == ("Columns(label=...)", "Columns(task='tag')")


def test_decode() -> None:
    assert decode(Path("a.csv"), b"caf\xc3\xa9") == "caf" + chr(233)


def test_check_text() -> None:
    with pytest.raises(
        DataError, match=re.escape("a.csv, line 2 must be a text without zero bytes, got a zero byte. ")
    ):
        check_text(Path("a.csv"), b"id,x\n1\0,2\n")


def test_has_utf8() -> None:
    assert (has_utf8("caf\u00e9"), has_utf8("\ud800")) == (True, False)


def test_data_error() -> None:
    error = data_error(Path("a.ts"), "2 channels", "@dimensions says 3", "add one", line=7)
    assert str(error) == "a.ts, line 7 must be @dimensions says 3, got 2 channels. Add one."


def test_repeats_ids() -> None:
    assert (repeats_ids({"id": [1, 1, 2], "x": [5, 6, 7]}, Columns()), repeats_ids({"id": [1, 2]}, Columns())) == (
        True,
        False,
    )


def test_seal() -> None:
    assert (is_sealed(seal({"sequences": 2})), is_sealed(seal({"sequences": 2}) | {"sequences": 3})) == (True, False)


def test_with_names() -> None:
    assert (with_names(Columns(label="kind"), {"label": "y", "sequence": "x"}).sequence) == "x"


def test_is_converted() -> None:
    assert not (is_converted(Path("no/such/folder")))


def test_labels_in() -> None:
    assert (labels_in("jazz; live;jazz"), labels_in(" ")) == (("jazz", "live"), ())


def test_lines_of(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"[1]\n\n[2]")
    assert [(line.number, line.content, line.end) for line in lines_of(path)] == [(1, b"[1]", 4), (3, b"[2]", 8)]


def test_places_of() -> None:
    assert (places_of(("b", "a"))) == {"b": 0, "a": 1}


def test_look_up() -> None:
    assert (look_up(["a", "b"], {"a": 3}, 2, -1).tolist()) == [3, -1]


def test_sort_labels() -> None:
    assert (sort_labels(["10", "2", "b", "2", "-1"])) == ["-1", "2", "10", "b"]


def test_layout_names() -> None:
    assert (Layout(True, (), "texts", True, False).names(Columns(label="kind"))) == {
        "label": "kind",
        "id": "id",
        "sequence": "sequence",
    }


def test_layout_serves() -> None:
    assert (
        Layout(True, (), "none", False, True).serves("tag"),
        Layout(True, (), "none", True, False).serves("tag"),
    ) == (True, False)


def test_buckets() -> None:
    assert (
        [(bucket.low, bucket.high, bucket.fill) for bucket in buckets(Distribution.of(np.array([1, 3, 4, 9])), 2)]
    ) == [(1, 3, 0.6666666666666666), (4, 9, 0.7222222222222222)]


def test_bins() -> None:
    assert ([str(bin) for bin in bins(Distribution.of(np.array([1, 2, 2, 9])), most=3)]) == ["0-4", "5-9"]
    assert ([str(bin) for bin in bins(Distribution.of(np.array([1] * 99 + [1000])), most=4)]) == [
        "1-5",
        "6-31",
        "32-177",
        "178-1,000",
    ]


def test_summary() -> None:
    found = summary(Distribution.of(np.array([4, 6, 8, 5, 4, 3, 7, 8])))
    assert (found.minimum, found.median, found.maximum, found.elements, round(found.fill, 2)) == (3, 5, 8, 45, 0.7)


def test_distribution() -> None:
    lengths = Distribution.of(np.array([4, 2, 4, 0]))
    assert (lengths.values.tolist(), lengths.counts.tolist(), lengths.quantile(0.5), lengths.quantile(1.0)) == (
        [0, 2, 4],
        [1, 1, 2],
        2,
        4,
    )


def test_expand() -> None:
    assert (expand(["b.parquet", Path("a.csv")])) == ["b.parquet", "a.csv"]


def test_is_url() -> None:
    assert (is_url("s3://bucket/names.parquet"), is_url("data/names.parquet")) == (True, False)


def test_fill_missing() -> None:
    series = np.array([[1.0], [np.nan], [np.nan], [4.0]], dtype=np.float32)
    assert (fill_missing(series, np.array([0, 2, 4]), "forward").tolist()) == [
        [1.0, 0.0],
        [1.0, 1.0],
        [0.0, 1.0],
        [4.0, 0.0],
    ]
    assert (fill_missing(series, np.array([0, 4]), "elapsed")[:, 2].tolist()) == [0.0, 1.0, 2.0, 3.0]


def test_how_to_fill() -> None:
    assert (how_to_fill()) == "train with missing='zero' or missing='forward'"


def test_is_panel() -> None:
    assert (
        is_panel(pandas.DataFrame({"a": [pandas.Series([1.0, 2.0])]})),
        is_panel(pandas.DataFrame({"a": [1.0]})),
    ) == (True, False)


def test_is_text() -> None:
    assert (is_text(["the cat"]), is_text([[], ["the", "cat"]]), is_text([[1.0]])) == (True, True, False)


def test_falling() -> None:
    assert (descending_keys(np.array([3, 1, 2], np.uint16)).tolist()) == [0, 2, 1]


def test_pieces_of() -> None:
    assert repr(pieces_of(np.array([3, 0, 5]), 2)) == "(array([0, 0, 1, 2, 2, 2]), array([2, 1, 0, 2, 2, 1]))"


def test_limit_shares() -> None:
    assert (BatchLimit(sequences=4, elements=10).usage(np.array([2, 6, 4])).tolist()) == [0.25, 0.8, 1.2]


def test_limit_cut() -> None:
    assert (
        repr(
            (
                BatchLimit(elements=10).cut(np.array([4, 5, 6, 3, 2])),
                BatchLimit(padded=12).cut(np.array([6, 5, 3, 3, 3])),
            )
        )
        == "(array([0, 2, 4]), array([0, 2]))"
    )


def test_limit_usual() -> None:
    assert (BatchLimit(elements=100).usual(8.0), BatchLimit(sequences=4, elements=100).usual(8.0)) == (12, 4)


def test_permutation() -> None:
    assert (Permutation(7, 10**12)(np.array([0, 1, 2])).tolist()) == [623279881741, 940120463802, 290063299063]


def test_shuffle() -> None:
    assert (shuffle(7, 6).tolist()) == [1, 5, 0, 4, 3, 2]


def test_uniform() -> None:
    assert (uniform(7, np.array([3, 4, 3])).round(2).tolist()) == [0.58, 0.45, 0.58]


def test_key_of() -> None:
    assert (key_of(1, 2) == key_of(1, 2), key_of(1, 2) == key_of(2, 1)) == (True, False)


def test_settle() -> None:
    found = settle([3, 9, 1], BatchLimit(elements=4, too_long="drop"))
    assert (found.dropped.tolist(), found.elements, found.longest) == ([1], 4, 3)


def test_share_out() -> None:
    assert repr(balance(np.array([5, 4, 3, 3, 2]), 2)) == "(array([0, 1, 1, 0, 1]), array([0, 0, 4, 5, 7]))"
    assert repr(balance(np.array([5, 4]), 10**18)) == "(array([0, 1]), array([0, 0]))"


def test_owners_of() -> None:
    assert repr(assign_ranks(np.array([2, 9, 3, 4]), 2)) == "array([1, 0, 1, 1])"


def test_fragment() -> None:
    words = Records(np.array(["a", "b", "a"], dtype=object), offsets_of([2, 1]), labels=("x", "y"))
    fragment = Fragment.of(words)
    assert fragment.labels is not None
    assert (fragment.words, fragment.values.tolist(), fragment.labels.tolist()) == (("a", "b"), [0, 1, 0], [0, 1])


def test_note_empty() -> None:
    assert (
        note_empty(Records(np.zeros((2, 1), np.float32), offsets_of([0, 2]), channels=("x0",)))
    ) == "1 of 2 sequences is empty (row 0): its class follows from the initial state alone"
    assert note_empty(Records(np.zeros((2, 1), np.float32), offsets_of([2]), channels=("x0",))) is None


def test_place_of() -> None:
    assert (place_of(np.array([0, 2, 2, 5]), 3)) == (2, 1)


def test_offsets_of() -> None:
    assert (offsets_of([4, 0, 2]).tolist()) == [0, 4, 4, 6]


def test_skipped_lines() -> None:
    assert (
        skipped_lines([Skipped("a.jsonl", "line 3", "a null")])
    ) == b'{"location": "a.jsonl", "place": "line 3", "error": "a null"}\n'


def test_characters_in() -> None:
    assert (characters_in(["to", "be"], 1, "words"), characters_in(["Ã", "©"], 1, "bytes")) == (6, 2)


def test_join_tokens() -> None:
    assert (
        join_tokens(["t", "o"], "characters"),
        join_tokens(["to", "be"], "words"),
        join_tokens(["Ã", "©"], "bytes"),
    ) == ("to", "to be", "é")


def test_split_texts() -> None:
    for split, expected, counts in (
        ("words", ["to", "be", "\u00e9"], [2, 1]),
        ("characters", ["t", "o", " ", "b", "e", "\u00e9"], [5, 1]),
        ("bytes", ["t", "o", " ", "b", "e", "\u00c3", "\u00a9"], [5, 2]),
    ):
        tokens, lengths = split_texts(["to be", "\u00e9"], split)
        assert (tokens.tolist(), lengths.tolist()) == (expected, counts)


def test_check_split() -> None:
    check_split("characters")


def test_featurecounts() -> None:
    city = Feature("city", np.array(["Rome", "", "Rome"], dtype=object), per_sequence=True)
    counts = FeatureCounts.of(city)
    assert (counts.words["Rome"], counts.missing, counts.categories) == (2, 1, 1)


def test_channel() -> None:
    assert (
        repr(Channel.of(np.array([1.0, np.nan, 3.0], np.float32)) + Channel.of(np.array([5.0], np.float32)))
        == "Channel(count=3, mean=3.0, squares=8.0, low=1.0, high=5.0, missing=1)"
    )


def test_kinds_of() -> None:
    assert (kinds_of(["2", "1.0", "2"]), kinds_of(["true", "1.0a"]), kinds_of([])) == (
        ("fractions", "whole numbers"),
        ("texts", "truth values"),
        (),
    )


def test_targets() -> None:
    assert Targets(np.array([[1.5], [2.0]]), names=("height",)).is_numbers


def test_fit_vocabulary() -> None:
    assert (fit_vocabulary({"b": 1, "a": 1, "c": 3, "<unk>": 9}, most=3)) == ("<unk>", "c", "a")
