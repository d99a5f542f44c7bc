"""The base of a Ragged: an object, and to type checkers the Tensor of ``typed.pyi``."""

from __future__ import annotations

Face = object
