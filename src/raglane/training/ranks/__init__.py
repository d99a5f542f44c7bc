"""Training by several processes, the ranks: each has the whole model and its share of every step.

``group.py`` is what the ranks of a training share: sums over all of them. ``launch.py`` starts ranks on this machine
and watches over them, ``child.py`` is what such a process does, and ``elsewhere.py`` is for processes that somebody
else has started, as torchrun does. All of them do the :class:`~raglane.training.work.Work` that one process has made.
"""
