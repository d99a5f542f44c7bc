"""``raglane inspect``: ``reading.py`` reads data, ``inspect.py`` makes text and JSON, ``page.py``
the page, and ``charts.py`` its charts.
"""
