"""Results, from plain numbers: :mod:`~raglane.report.figures` draws, :mod:`~raglane.report.page` writes pages.

Nothing is imported here. Tables are those of :mod:`raglane._utils.table`.
"""
