"""Programs on a GPU, printed as Triton kernels: printer.py (the text), functions.py (what it
calls), launch.py.
"""
