"""Results from plain numbers: :mod:`~raglane.report.figures` draws, :mod:`~raglane.report.page`
makes pages.
"""
