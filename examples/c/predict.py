"""Print the outputs of the head of a stored model, like examples/c/predict.

python predict.py MODEL < sequences.txt
"""

import sys

import torch

import raglane as rl
from raglane.training.inference import answering

run = rl.load(sys.argv[1])
lines = [[float(number) for number in line.split()] for line in sys.stdin]
if run.preprocessor.is_tokens:
    sequences = [torch.tensor(line, dtype=torch.int64) for line in lines]
else:
    sequences = [torch.tensor(line).reshape(-1, run.model.config.input_size) for line in lines]
with answering(run.model):
    answers = run.model(rl.Ragged(sequences))
if run.task == "forecast":  # the forecast after the last element
    answers = answers.last(empty=float("nan"))
for row in answers if isinstance(answers, torch.Tensor) else answers.values:
    print(" ".join(f"{number:.9g}" for number in row.tolist()))
