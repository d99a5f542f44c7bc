"""Tools that need no sequences.

Users: checks.py checks arguments, and messages.py builds parts of the messages of errors, words.py
times and sizes in words. table.py prints tables, options.py describes options, and drawing.py has
the colours and figures of pictures.

The system: files.py writes files and folders atomically, json.py reads and writes JSON, lock.py
locks folders, and caches.py keeps small files in the user's cache folder. memory.py estimates
required and available memory, and forks.py detects a fork.

Torch: operators.py registers operators, tracing.py supports its transformations, and derivatives.py
computes gradients of kernels by plain torch. lazy.py loads modules when their names are used.
"""
