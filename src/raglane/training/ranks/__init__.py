"""Training by several processes, the ranks: each has the whole model and its share of every step.

``group.py`` has the ranks and sums over all of them. ``launch.py`` starts ranks on this machine, watches over them, and
is what they run; ``elsewhere.py`` is for ranks that torchrun started, ``on_ray.py`` for those of a Ray cluster. All of
them do the same :class:`~raglane.training.job.Job`.
"""
