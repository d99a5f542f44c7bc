"""Attacks on the library: random calls of a careless or hostile caller. ``python -m attacks.NAME --help``."""
