"""Recurrent networks as scikit-learn estimators; requires the extra ``sklearn``.

estimators.py is a classifier and a regressor.

>>> import numpy as np
>>> from raglane.sklearn import RecurrentClassifier
>>> rising, falling = [np.linspace(0, 1, 4), np.linspace(0, 1, 7)], [np.linspace(1, 0, 5), np.linspace(1, 0, 3)]
>>> model = RecurrentClassifier(hidden_size=8, epochs=60, validation_fraction=0).fit(rising + falling, [1, 1, 0, 0])
>>> model.predict([np.linspace(0.1, 0.8, 6)])
array([1])
"""

from __future__ import annotations

from raglane.sklearn.estimators import RecurrentClassifier, RecurrentRegressor

__all__ = ["RecurrentClassifier", "RecurrentRegressor"]
