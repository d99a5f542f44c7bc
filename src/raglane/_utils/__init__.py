"""Tools that need no sequences.

checks.py checks arguments, and messages.py builds parts of the messages of errors. files.py writes
files and folders atomically, lock.py locks folders, caches.py keeps small files in the user's cache
folder. memory.py estimates required and available memory, and forks.py detects a fork.

operators.py registers operators of torch, and tracing.py supports its transformations. table.py
prints tables, and drawing.py has the colours and figures of pictures.
"""
