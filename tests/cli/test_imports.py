"""Imports without collections of garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from raglane.cli.imports import importing


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_garbage_is_collected_again_after_imports_and_their_errors() -> None:
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_a_program_without_collections_stays_without_them() -> None:
    gc.disable()
    try:
        with importing():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
