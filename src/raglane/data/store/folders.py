"""The files of locations: patterns, folders and URLs."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from raglane._utils.checks import check_kind
from raglane._utils.messages import quote
from raglane.data.formats import by_suffix
from raglane.data.sources.files import suffix_of
from raglane.data.sources.ipc import is_converted
from raglane.data.sources.locations import fsspec, is_url, path_in, reaching
from raglane.errors import ArgumentError, DataError


def expand(locations: Any) -> list[str]:
    """Return the files, folders and URLs of locations with patterns, in order."""
    many = isinstance(locations, Sequence) and not isinstance(locations, (str, bytes))
    files: list[str] = []
    for path in locations if many else [locations]:
        rule = "a path, a pattern or a URL, or a list of these"
        fix = "pass a str or a pathlib.Path"
        check_kind("location", path, (str, os.PathLike), rule, fix)
        files += _expand(os.fspath(path))
    if not files:
        raise ArgumentError("location", "an empty list", "at least one file", "pass the data")
    return files


def _expand(location: str) -> list[str]:
    has_pattern = any(sign in location for sign in "*?[")
    if is_url(location):
        if not has_pattern and (
            by_suffix(path_in(location)) is not None or location.startswith("http")
        ):
            return [location]
        with reaching(location):
            system, path = fsspec().url_to_fs(location)
            # Unlike isdir, info raises if the store cannot be reached.
            if not has_pattern and system.info(path)["type"] != "directory":
                return [location]
            names = (
                system.glob(path)
                if has_pattern
                else filter(_is_data, system.ls(path, detail=False))
            )
            files = sorted(map(system.unstrip_protocol, names))
    elif has_pattern and not os.path.lexists(location):
        files = sorted(glob.glob(location, recursive=True))
    elif os.path.isdir(location):
        return _files_of(Path(location)) or [location]
    else:
        return [location]
    if not files:
        raise DataError(
            quote(location), "no file", "a pattern that matches a file", "check the pattern"
        )
    return files


def _files_of(folder: Path) -> list[str]:
    """Return the files of known formats in a folder; none if the folder itself is the data, such as
    one of tables of texts.
    """
    files = [] if is_converted(folder) else folder.iterdir()
    names = sorted(str(path) for path in files if _is_data(path) and path.is_file())
    kinds = {by_suffix(PurePath(name)) for name in names}
    return [] if any(kind is not None and kind.name == "csv" for kind in kinds) else names


def _is_data(path: str | Path) -> bool:
    """Return True for a file of a known format; .txt is data only in a folder of texts, and .json
    describes data.
    """
    format = by_suffix(PurePath(path))
    return format is not None and format.name != "text" and suffix_of(PurePath(path)) != ".json"
