"""Runs: :func:`raglane.fit` trains one, :func:`raglane.load` reads one, and the commands call both.

Training: training.py trains for both, from sources.py (of data, with parts.py), with progress.py and
configuration.py (options as TOML); fit.py is its interface in Python, with the types of options.py,
and dry_run.py what a training would do. tuning.py searches for hyperparameters.

Use: run.py is a run in Python, tables.py its predictions in workers of Spark, Dask or Ray,
ray_predictions.py on a Ray cluster, stream_frames.py on live streams, and exported.py its ONNX file.

Pages: card.py is the model card, with advice.py and forecast_pictures.py; comparison.py compares
runs, comparison_page.py as a page. inspection/ is ``raglane inspect``.

Nothing is imported here, so that help texts do not import torch.
"""
