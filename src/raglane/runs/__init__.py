"""Runs: :func:`raglane.fit` trains one, :func:`raglane.load` reads one, and the commands call both.

training.py trains for both, from sources.py (of data), with progress.py and configuration.py
(options as TOML) to card.py, the model card, and advice.py; fit.py is its interface in Python.

run.py is a run in Python, tables.py its predictions in workers of Spark, Dask or Ray, on_ray.py on
a Ray cluster, and exported.py its ONNX file.

tuning.py searches for hyperparameters; comparison.py compares runs, comparison_page.py as a page.
inspection/ is ``raglane inspect``.

Nothing is imported here, so that help texts do not import torch.
"""
