"""Faults that the tests must notice: a list of them, and what puts them into a copy of the source, one at a time."""
