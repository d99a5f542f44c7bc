"""Weights of other libraries, one file per source: keras.py, flax.py, xlstm.py and onnx.py.

arrays.py builds layers of arrays. onnx_file.py reads files without the package onnx, and
onnx_values.py computes the values of their graphs, by the operators in onnx_rules.py.
"""
