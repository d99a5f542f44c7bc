"""The cases of ``tools/contact.py``: commands of a newcomer, and their answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from contact import CASES, Case, make_files, wrong


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contact")
    make_files(folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.command)
def test_the_answer_is_right(case: Case, folder: Path) -> None:
    assert not wrong(case, folder)
