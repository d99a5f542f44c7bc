"""Attacks on the library: what a careless or hostile caller, a broken file or a dying machine could do to it."""
