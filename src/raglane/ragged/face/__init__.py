"""The torch functions of a Ragged: one table, with a file per kind of functions."""
