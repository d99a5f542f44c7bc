"""Mixers of models of transformers, converted in place by ``rl.accelerate``.

``base.py`` has what all converted mixers share, and ``families.py`` which class of transformers
becomes which; each other file is one family. ``entry.py`` is the hook by which lengths enter a
model, ``layout.py`` what a mixer makes of them, and ``memory.py`` reads and writes the caches of
transformers, which is never imported.

NOTE (lengths): a model passes few arguments on to its mixers. So the hook puts lengths into one
that it does pass on, as numbers of sequences ``(B, T)``: the attention mask, which is 0 for
padding, or ``seq_idx``, which is -1 for it. They are arguments because gradient checkpointing computes mixers again
after the call of the model.
"""
