"""The benchmark of the recurrent layers: Raglane's against PyTorch's, and against other installed
engines.

A :class:`~harness.cases.Case` is one layer on one batch; ``SUITES`` lists the cases,
``COMPETITORS`` the engines. Each competitor is timed only after its answer is compared with
``reference`` in float64; all take turns in one process. :func:`harness.run.measure` runs cases, and
``benchmarks/layers.py`` is the command line.
"""
