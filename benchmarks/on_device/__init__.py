"""The parts of ``benchmarks/device.py``: what only a GPU, or many processors, can show."""
