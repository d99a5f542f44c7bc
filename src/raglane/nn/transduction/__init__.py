"""From sequence to sequence without padding: losses over alignments, decoders, beam searches.

search.py is a beam search for any model, lanes.py its running batch, and hypotheses.py its result.
decoder.py is a decoder with the attention of attention.py, transducer.py a transducer, and
tokens.py their base.

rnnt.py is the loss of a transducer, fused.py that of a linear joint on a CPU, and lattice.py has
the recursions of both. ctc.py searches and aligns for CTC, prefixes.py is its search in plain
Python, and ngram.py scores prefixes. pairs.py compares two sequences of an item.
"""
