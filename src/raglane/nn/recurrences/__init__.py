"""Linear recurrences over the steps of sequences: the selective scan, and linear attention.

``selective.py`` and ``attention.py`` have the functions and check their arguments; ``loops.py`` the
equations in plain torch, and ``recurrence_operator.py`` operators of torch that run the kernels of
``csrc/recurrence``. ``depthwise.py`` is the short convolution that precedes them.
"""
