"""In which order a loader goes through the sequences: one file a policy, and one line in ``SAMPLERS``."""

from __future__ import annotations

from torch.utils.data import Sampler

from raglane.data.samplers.bucket import BucketBatchSampler

__all__ = ["SAMPLERS", "BucketBatchSampler"]

SAMPLERS: dict[str, type[Sampler[list[int]]]] = {"bucket": BucketBatchSampler}
