"""The benchmark of the recurrent layers: Raglane's against PyTorch's, and against other engines where installed.

A :class:`~harness.cases.Case` says what runs; ``SUITES`` lists the cases, ``COMPETITORS`` who runs them. Each
competitor is timed only after its answer is compared with ``reference`` in float64; all take turns in one process.
:func:`harness.run.measure` does it, and ``benchmarks/layers.py`` is its command line. Nothing is imported here.
"""
