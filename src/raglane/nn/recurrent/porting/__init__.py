"""Weights of other libraries, one file per source: Keras, Flax, ONNX, xlstm."""
