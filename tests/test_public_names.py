"""The names that users may rely on. A change here is a change of the public face: say it in the changelog."""

from __future__ import annotations

import raglane as rl


def test_package() -> None:
    assert sorted(rl.__all__) == [
        "Ragged",
        "Run",
        "accelerate",
        "collate",
        "cost",
        "data",
        "errors",
        "explain",
        "export",
        "fit",
        "freeze",
        "lens",
        "load",
        "nn",
        "packing",
        "plan",
        "plot",
        "serve",
        "sklearn",
        "unaccelerate",
        "use_backend",
    ]
    assert all(hasattr(rl, name) for name in rl.__all__)


def test_layers() -> None:
    assert set(rl.nn.__all__) == set(
        """AttentionPooling CRF CausalConv1d CfC CoupledLSTM GRU GRUD IndRNN LSTM LayerNormGRU LayerNormLSTM
        MinGRU MinLSTM PeepholeLSTM Pooling QRNN RNN Recurrent SLSTM SRU SequenceEncoder carry init losses""".split()
    )


def test_losses() -> None:
    assert set(rl.nn.losses.__all__) == set(
        """binary_cross_entropy_with_logits cross_entropy ctc_loss huber_loss l1_loss mse_loss nll_loss""".split()
    )


def test_initialisation() -> None:
    assert set(rl.nn.init.__all__) == {"chrono_", "forget_bias_", "orthogonal_", "xavier_"}


def test_packing() -> None:
    assert sorted(rl.packing.__all__) == [
        "PackedSequence",
        "invert_permutation",
        "pack_padded_sequence",
        "pack_sequence",
        "pad_packed_sequence",
        "pad_sequence",
        "unpack_sequence",
        "unpad_sequence",
    ]


def test_pictures() -> None:
    assert set(rl.plot.__all__) == set(
        """Picture attention gates histogram lanes norms packed padded roofline schedules theme times waste""".split()
    )


def test_export() -> None:
    assert set(rl.export.__all__) == {"build_operators", "onnx", "package"}


def test_ragged() -> None:
    public = {name for name in dir(rl.Ragged) if not name.startswith("_")}
    assert public == set(
        """concat cu_seqlens cumsum detach device dtype features fill first from_arrow from_flat from_nested
        from_packed from_padded host_lengths last lengths logsumexp map mask max max_length mean min offsets
        order_by_length pin_memory positions requires_grad reverse segment_ids select shift softmax spread sum
        to to_arrow to_list to_nested to_numpy to_packed to_padded truncate values windows with_values""".split()
    )
