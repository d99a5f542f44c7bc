"""Training, stored models, prediction and evaluation, without command line and files of data.

``settings.py`` has the settings, ``trainer.py`` the loop, ``tasks/`` the losses and metrics,
``ranks/`` several processes, ``checkpoint.py`` stored models and ``inference.py`` their use.
Nothing is imported here, so that help texts do not wait for PyTorch.
"""
