"""Training, prediction and evaluation on ragged batches: what the command line does, as functions.

:func:`~raglane.training.run.train` makes a run, :func:`~raglane.training.checkpoint.load_model` reads its model,
:func:`~raglane.training.inference.predict` and :func:`~raglane.training.inference.evaluate` use it. Import them from
their modules: nothing is imported here, so that a help text need not wait for PyTorch.
"""
