"""The preparation of data for a model: vocabularies, scales, missing values; and statistics."""
