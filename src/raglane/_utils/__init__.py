"""Checks of arguments, files, locks, caches, memory, tracing and drawing: what needs no
sequences.
"""
