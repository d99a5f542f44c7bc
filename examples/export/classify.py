"""Classify sequences with a file of ``raglane export RUN -o model.onnx``: requires only NumPy and
ONNX Runtime.

python classify.py model.onnx '[[[0.1, 2.0], [0.3, 1.9]], [[0.7, 1.1]]]'
"""

import json
import sys

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1])
labels = json.loads(session.get_modelmeta().custom_metadata_map["raglane"])["labels"]
sequences = [np.array(sequence, dtype=np.float32) for sequence in json.loads(sys.argv[2])]
lengths = np.array([len(sequence) for sequence in sequences])
values = np.zeros((len(sequences), lengths.max(), sequences[0].shape[1]), dtype=np.float32)
for row, sequence in zip(values, sequences, strict=True):
    row[: len(sequence)] = sequence
(shares,) = session.run(None, {"values": values, "lengths": lengths})
for share in shares:
    print(labels[share.argmax()], f"{share.max():.4f}")
