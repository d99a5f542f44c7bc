"""CoNLL: words with their columns, a blank line after each sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

import raglane as rl
from raglane.data import Columns, Dataset
from raglane.data.assemble.answers import filled
from raglane.data.assemble.pieces import sift
from raglane.data.formats import pick
from raglane.data.sources import conll
from raglane.errors import ArgumentError, DataError
from raglane.training.predictions import write_predictions

_TAG = Columns(task="tag")

_NER = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

# NN B-NP O
Bonn NNP I-NP B-LOC


-DOCSTART- -X- -X- O

Paris NNP B-NP B-LOC
"""

_UD = """# newdoc id = d
# sent_id = s1
# text = vamonos al mar
1-2\tvamonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tvamos\tir\tVERB\t_\t_\t0\troot\t_\t_
2\tnos\tnos\tPRON\t_\t_\t1\tobj\t_\t_
2.1\tfuimos\t_\t_\t_\t_\t_\t_\t_\t_
3\tal mar\tmar\tNOUN\t_\t_\t1\tobl\t_\t_

# sent_id = s2
1\tmar\tmar\tNOUN\t_\t_\t0\troot\t_\t_
"""


def _read(tmp_path: Path, text: str, name: str = "a.conll", columns: Columns = _TAG) -> Dataset:
    path = tmp_path / name
    path.write_text(text)
    return rl.data.read(path, columns)


def _sentences(data: Dataset) -> list[tuple[list[str], list[str]]]:
    records = data.records
    assert records.tags is not None
    words, tags = records.values.tolist(), records.tags.tolist()
    pairs = zip(records.offsets[:-1], records.offsets[1:], strict=True)
    return [(words[start:end], tags[start:end]) for start, end in pairs]


_EXPECTED = [
    (["EU", "rejects"], ["B-ORG", "O"]),
    (["#", "Bonn"], ["O", "B-LOC"]),
    (["Paris"], ["B-LOC"]),
]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.conll", _NER),
        ("a.txt", _NER),
        ("a.iob2", _NER.replace(" ", "\t")),
        ("a.bio", _NER.replace(" ", "   ")),
        ("a.conll", _NER.replace("\n", "\r\n")),
        ("a.conll", "\ufeff" + _NER),
        ("a.conll", _NER.rstrip("\n")),
    ],
)
def test_words_of_conll_2003(tmp_path: Path, name: str, text: str) -> None:
    data = _read(tmp_path, text, name)
    assert _sentences(data) == _EXPECTED
    assert "left out: 2 lines of -DOCSTART-" in data.notes
    assert any("column 4, the last of 3, 4" in note for note in data.notes)


@pytest.mark.parametrize(("label", "first"), [("2", "NNP"), ("-2", "B-NP"), ("4", "B-ORG")])
def test_a_label_column_has_a_number(tmp_path: Path, label: str, first: str) -> None:
    data = _read(tmp_path, _NER, columns=Columns(task="tag", label=label))
    assert _sentences(data)[0][1][0] == first


@pytest.mark.parametrize("label", [None, "UPOS", "upos", "4"])
def test_conllu_without_ranges_and_empty_nodes(tmp_path: Path, label: str | None) -> None:
    data = _read(tmp_path, _UD, "a.conllu", Columns(task="tag", label=label))
    assert _sentences(data) == [
        (["vamos", "nos", "al mar"], ["VERB", "PRON", "NOUN"]),
        (["mar"], ["NOUN"]),
    ]
    assert data.ids == ("s1", "s2")
    assert "left out: 4 lines of comments, 2 lines of several words or empty nodes" in data.notes


def test_columns_of_words_are_features(tmp_path: Path) -> None:
    columns = Columns(task="tag", sequence="form", features=("lemma",), label="deprel")
    records = _read(tmp_path, _UD, "a.conllu", columns).records
    assert [feature.name for feature in records.features] == ["LEMMA"]
    assert records.features[0].values.tolist() == ["ir", "nos", "mar", "mar"]


def test_global_columns_name_the_columns(tmp_path: Path) -> None:
    text = "# global.columns = ID FORM UPOS X:Y\n1\ta\tDET\tp\n2\tb\tNOUN\tq\n"
    assert _sentences(_read(tmp_path, text)) == [(["a", "b"], ["DET", "NOUN"])]
    data = _read(tmp_path, text, columns=Columns(task="tag", label="X:Y"))
    assert _sentences(data) == [(["a", "b"], ["p", "q"])]


def test_labels_may_be_the_first_column(tmp_path: Path) -> None:
    data = _read(tmp_path, "B-Actor\tbrad\nI-Actor\tpitt\n\nO\tshow\nO\tme\n", "a.bio")
    assert _sentences(data) == [
        (["brad", "pitt"], ["B-Actor", "I-Actor"]),
        (["show", "me"], ["O", "O"]),
    ]


def test_hashtags_are_words_and_comments_are_none(tmp_path: Path) -> None:
    text = "#go\tO\n@x\tO\n\n#new\tB-thing\n#\tO\nb\tI-thing\n"
    assert [words for words, _ in _sentences(_read(tmp_path, text))] == [
        ["#go", "@x"],
        ["#new", "#", "b"],
    ]
    text = "# id 1 domain=en\na _ _ O\nb _ _ B-X\n\n# id 2 domain=en\nc _ _ O\n"
    data = _read(tmp_path, text)
    assert [words for words, _ in _sentences(data)] == [["a", "b"], ["c"]]
    assert "left out: 2 lines of comments" in data.notes


def test_documents_and_counts_are_no_words(tmp_path: Path) -> None:
    text = "#begin document (d); part 0\nd 0 0 In IN B-X\nd 0 1 May NN O\n\nd 0 0 He PR O\n"
    data = _read(tmp_path, text)
    assert [words for words, _ in _sentences(data)] == [["In", "May"], ["He"]]


def test_columns_that_not_all_sentences_have_are_left_out(tmp_path: Path) -> None:
    text = "In IN *\nMay NN *\n\nHe PR * x\nran VB * y\n"
    with pytest.raises(DataError, match=r"different numbers of columns.*label"):
        _read(tmp_path, text)
    data = _read(tmp_path, text, columns=Columns(task="tag", label="2"))
    assert _sentences(data)[1] == (["He", "ran"], ["PR", "VB"])
    assert "left out: columns 4 to 4, which not all sentences have" in data.notes


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a O\nb X O\n", r"line 2.*3 columns, after 2"),
        ("a\nb\n", r"1 column of words"),
        ("1\ta\tX\n2\tb\tX\n1\tc\tX\n", r"line 3.*the word 1 again.*blank line"),
        ("# a comment\n", r"no word"),
        ("a\t\tO\n", r"an empty column"),
        (_UD.replace("VERB", "_").replace("PRON", "_").replace("NOUN", "_"), r"UPOS.*empty"),
        ("# global.columns = ID FORM\n1\ta\tX\n", r"3 columns.*global\.columns"),
    ],
)
def test_refused(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(DataError, match=match):
        _read(tmp_path, text)


def test_words_have_no_label_per_sequence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"task='tag'"):
        _read(tmp_path, _NER, columns=Columns())


def test_a_language_model_reads_the_words(tmp_path: Path) -> None:
    data = _read(tmp_path, _NER, columns=Columns(task="language"))
    assert data.records.values.tolist() == ["EU", "rejects", "#", "Bonn", "Paris"]


def test_pieces_are_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text(_NER)
    for start, expected in (((), 3), ((3,), 0)):
        parts = [
            part
            for piece in pick(path, "conll").pieces(path, _TAG, start)
            for part in sift(piece, None)
        ]
        assert sum(map(len, parts)) == expected
    folder = tmp_path / "converted"
    rl.data.convert(path, folder, _TAG)
    assert Dataset(folder, _TAG).lengths.tolist() == [2, 2, 1]


@pytest.mark.parametrize("text", [_NER, _NER.replace("\n", "\r\n"), _NER.replace(" ", "\t")])
def test_filled_changes_only_the_labels(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.conll"
    path.write_bytes(text.encode())
    answers = [["X", "Z"], ["Z", "W"], ["V"]]
    data = rl.data.read(path, _TAG)
    path.write_bytes(filled(path, data.columns, answers))
    again = rl.data.read(path, Columns(task="tag", label="4"))
    assert [tags for _, tags in _sentences(again)] == answers
    mark = "\t" if "\t" in text else " "
    contents = (text, path.read_bytes().decode())
    before, after = ([line.rsplit(mark, 1)[0] for line in each.split("\n")] for each in contents)
    assert after == before
    assert path.read_bytes().count(b"\r") == text.count("\r")


def test_filled_adds_a_column_to_words_without_labels(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("a\nb\n\nc")
    columns = Columns(task="tag", label="4")
    assert filled(path, columns, [["X", "Y"], ["Z"]]) == b"a X\nb Y\n\nc Z"
    with pytest.raises(DataError, match="1 labels for 3 words"):
        filled(path, columns, [["X"]])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_NER, True),
        (_UD, True),
        ("a O\nb B-X\nc O\n", True),
        ("the cat sat\non the mat\nwith a hat\n", False),
        ("a DET\nb NOUN\nc NOUN\n", False),
        ("one\ntwo\nthree\n", False),
        ("", False),
    ],
)
def test_first_lines_decide(text: str, expected: bool) -> None:
    assert conll.is_conll(text) == expected


def test_suffixes(tmp_path: Path) -> None:
    for suffix in conll.SUFFIXES:
        path = tmp_path / f"a{suffix}"
        path.write_text(_NER)
        assert pick(path).name == "conll"


def test_predictions_are_written_as_conll(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(_NER)
    run = rl.fit(path, epochs=1, hidden_size=4, threads=1, validation_fraction=0)
    assert run.task == "tag"
    data = run.read(path, need_labels=False)
    predictions = run.predict(data)
    write_predictions(tmp_path / "b.iob2", predictions, data=data)
    again = rl.data.read(tmp_path / "b.iob2", Columns(task="tag", label="4"))
    assert [tags for _, tags in _sentences(again)] == predictions.columns["prediction"]
    assert {"entity_f1", "entity_precision", "entity_recall"} <= set(run.evaluate(path).numbers)
    words = run.read([["EU", "rejects"]], need_labels=False)
    for other in (words, None):
        with pytest.raises(ArgumentError, match="unless DATA is CoNLL"):
            write_predictions(tmp_path / "c.conll", run.predict(words), data=other)
    assert not (tmp_path / "c.conll").exists()
