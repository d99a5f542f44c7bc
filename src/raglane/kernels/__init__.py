"""The backends, which execute a cell on a schedule."""
