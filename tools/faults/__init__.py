"""Faults that the tests must notice, and the program that puts them into copies of the source."""
