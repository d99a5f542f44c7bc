"""Models and weights of other libraries.

accelerate.py converts torch's layers in a model, transformers/ its mixers, and episodes.py policies
that reset states.
convert.py imports the weights of a layer, with one file per source: keras.py, flax.py, xlstm.py and
onnx.py. arrays.py builds layers of arrays. onnx_file.py reads files without the package onnx, and
onnx_values.py computes the values of their graphs, by the operators in onnx_rules.py.
"""
