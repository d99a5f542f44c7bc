"""Labels of words that are parts of entities."""

from __future__ import annotations

import re
from collections.abc import Sequence

is_entity = re.compile(r"[BIESLUM]-\S+").fullmatch


def are_entities(labels: Sequence[str]) -> bool:
    """Return True if all labels are parts of entities, and one has a type."""
    different = set(labels) - {"O"}
    return bool(different) and all(map(is_entity, different))
