"""Recurrent layers and the steps of their calls.

layer.py is the base class of all layers, stack.py has their settings, weights and initial states.
torch_layers.py is RNN, LSTM and GRU, cell_layers.py and elementwise_layers.py have the layers of
other cells, and any_cell.py those of a user's cell.

call.py runs a layer: inputs.py reads its input, resets.py splits it into episodes, and
regularisation.py draws masks. carry.py carries states from chunk to chunk, packed_weights.py packs weights
for inference, and explain.py explains which backend runs a layer.
"""
