"""``raglane inspect``: what data looks like, and how to train on it.

``reading.py`` reads a file (``lengths_of_text.py`` and ``lengths_of_parquet.py`` millions of lengths) into
``contents.py``; ``lengths.py`` and ``batches.py`` count, ``inspect.py`` asks the planner and holds all that was found,
``command.py`` makes a training command of it. ``text.py`` prints it, ``document.py`` writes it as JSON, ``page.py``
as a page with ``charts.py`` and ``pictures.py``.
"""
