"""Training, stored models, prediction and evaluation, without command line and files of data.

Jobs: settings.py with options.py, machine.py (limits of the machine), own_cell.py (cells of the
user); job.py is run.json, folder.py the folder of a run, and run.py runs a job, in the processes of
ranks/.

The loop: trainer.py, with batches.py, learner.py (the loss of a batch, and the optimizer), state.py
and checkpoint.py (stored models); stored.py validates JSON. tasks/ has losses and metrics, and
model.py the network.

Use: inference.py, with decoders.py (of the task transcribe), predictions.py (files) and
per_sequence.py (scores of single sequences).

Nothing is imported here, so that help texts do not wait for PyTorch.
"""
