"""From sequence to sequence: losses over alignments, decoders and beam searches, without
padding.
"""
