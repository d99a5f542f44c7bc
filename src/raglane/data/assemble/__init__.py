"""Columns and roles to records.

opened.py decides about a parsed file and makes its records: tabular.py where a row is an element or
a column a step, with elements.py, grouping.py and times.py, and lists.py where a row is a sequence,
with sequences.py and reader.py; targets.py has the labels of both. in_memory.py does the same for
objects of a program, and padding.py ends padded sequences.

pieces.py reads a file in pieces, by the generators of streams.py and csv_pieces.py. answers.py
writes predictions into the lines of a file, and errors.py has refusals and errors as values.
"""
