"""Results from plain numbers.

- ``figures``: pictures and tables of runs
- ``page``: pages made of blocks, by the template ``page.html``, or as Markdown
"""
