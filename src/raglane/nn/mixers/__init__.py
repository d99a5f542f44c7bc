"""Mamba and its kin: blocks of projections, a short convolution and a linear recurrence.

``block.py`` has the base of blocks and of their layers, and each other file one block. A block is
written once, and computes rows in a *way* of ``ways.py``: whole sequences on the kernels, one
step in plain torch, or one step whose operations are recorded in a table (``step_table.py``), which
the kernels run in one call.
"""
