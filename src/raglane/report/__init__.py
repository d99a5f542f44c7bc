"""Figures and tables of results: what a person looks at, from plain numbers.

:mod:`~raglane.report.figures` draws, :mod:`~raglane.report.tables` writes text. Nothing is imported here.
"""
