"""Losses of sequences of labels: comparison.py has the weights and reductions that they share, and
ctc.py is connectionist temporal classification.

Losses per element are those of torch, which accept a Ragged.
"""
