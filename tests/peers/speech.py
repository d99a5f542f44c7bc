"""Packages for speech and sound."""

from __future__ import annotations

from typing import Any

import torch
from comparison import Example


def speechbrain() -> Example:
    """A bidirectional LSTM of speechbrain, which packs, with CTC."""
    from speechbrain.lobes.models.CRDNN import CRDNN
    from speechbrain.nnet.losses import ctc_loss
    from speechbrain.nnet.RNN import LSTM

    model = CRDNN(
        input_shape=[None, None, 40],
        activation=torch.nn.Softplus,
        cnn_blocks=1,
        cnn_channels=[8],
        rnn_class=LSTM,
        rnn_layers=2,
        rnn_neurons=32,
        rnn_bidirectional=True,
        dnn_blocks=1,
        dnn_neurons=32,
    )
    shares = torch.tensor([1.0, 0.8, 0.5, 0.4])
    batches = [(torch.randn(4, 60, 40), torch.randint(1, 32, (4, 5))) for _ in range(2)]

    def loss(module: Any, batch: Any) -> Any:
        output = module(batch[0])
        probabilities = output.log_softmax(-1)
        return ctc_loss(probabilities, batch[1], shares, torch.ones(4), blank_index=0), output

    return Example(model, batches, loss)


def openunmix() -> Example:
    """The separator of openunmix, small, on made spectrograms."""
    from openunmix.model import OpenUnmix

    model = OpenUnmix(nb_bins=64, nb_channels=1, hidden_size=64, nb_layers=2)
    batches = [torch.rand(4, 1, 64, 80) for _ in range(2)]

    def loss(module: Any, batch: Any) -> Any:
        output = module(batch)
        return (output - 0.5 * batch).square().mean(), output

    return Example(model, batches, loss)


def asteroid() -> Example:
    """The dual-path network of asteroid, which estimates masks of two speakers."""
    from asteroid.masknn.recurrent import DPRNN

    model = DPRNN(16, 2, bn_chan=16, hid_size=16, chunk_size=20, n_repeats=2)
    batches = [torch.rand(2, 16, 120) for _ in range(2)]

    def loss(module: Any, batch: Any) -> Any:
        masks = module(batch)
        return (masks - 0.5).square().mean(), masks

    return Example(model, batches, loss)
