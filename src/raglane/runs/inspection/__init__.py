"""``raglane inspect``: what data looks like, and how to train on it.

``reading.py`` reads a file. ``inspect.py`` counts, takes the planner's advice, makes a command of it, holds all in
one object, and writes that as lines and as JSON; ``page.py`` as a page with ``charts.py``.
"""
