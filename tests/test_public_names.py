"""The names that users may rely on. A change here is a change of the public face: say it in the
changelog.
"""

from __future__ import annotations

import operator
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import raglane as rl
from raglane.ragged.face.table import methods

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            rl,
            """Ragged Run accelerate collate import_layer cost data distributions errors explain export fit lens load nn
            pack_weights packing plan plot quantize serve sklearn testing to_torch transduction use_backend""",
        ),
        (
            rl.nn,
            """AttentionPooling CRF CausalConv1d CfC CoupledLSTM GRU GRUD IndRNN LSTM LayerNormGRU LayerNormLSTM MinGRU
            MinLSTM PeepholeLSTM Pooling QRNN RNN Recurrent SLSTM SRU SequenceEncoder init
            Attention Conv1d MaxPool1d AvgPool1d linear_attention selective_scan
            GatedDeltaNet MLSTM Mamba Mamba2 RGLRU""",
        ),
        (
            rl.transduction,
            """AttentionDecoder CTCBeamSearch NGram Transducer beam_search ctc_align ctc_greedy_search ctc_loss
            edit_distance rnnt_loss soft_dtw""",
        ),
        (rl.nn.init, "chrono_ forget_bias_ orthogonal_ xavier_uniform_"),
        (
            rl.packing,
            """PackedSequence invert_permutation pack_padded_sequence pack_sequence pad_packed_sequence pad_sequence
            unpack_sequence unpad_sequence""",
        ),
        (
            rl.plot,
            "attention gates histogram lanes norms packed padded schedules theme waste",
        ),
        (rl.export, "aot_inductor copy_operators onnx"),
        (rl.serve, "AsyncClient Client Engine Events deployment"),
        (rl.testing, "assert_close"),
    ],
)
def test_modules(module: Any, names: str) -> None:
    assert sorted(module.__all__) == sorted(names.split())
    assert all(hasattr(module, name) for name in module.__all__)


def _front_row(page: str) -> list[str]:
    _, _, rest = (ROOT / page).read_text(encoding="utf-8").partition(" The names you need\n")
    rows = [line for line in rest.partition("\n#")[0].splitlines() if line.startswith("|")]
    return re.findall(r"`rl\.([\w.]+)`", "\n".join(rows))


def test_the_front_row_has_about_forty_names() -> None:
    names = _front_row("README.md")
    assert 35 <= len(names) <= 45
    assert names == _front_row("docs/index.md")
    for name in names:
        operator.attrgetter(name)(rl)
    # Names at the top are for everyone; the others are modules.
    top = {name for name in rl.__all__ if not isinstance(getattr(rl, name), ModuleType)}
    assert {name for name in names if "." not in name} == top - {"Run"}


def test_ragged() -> None:
    """Except for the methods of torch.Tensor, which tests/face calls."""
    names = {name for name in dir(rl.Ragged) if not name.startswith("_")} - methods().keys()
    assert names == set(
        """broadcast concat contiguous cpu cu_seqlens cuda density device dim dtype feature_shape first
        from_arrow from_flat from_nested from_packed from_padded from_steps imag is_cpu is_cuda is_nested is_quantized
        is_sparse last layout lengths lengths_cpu map mask max_length ndim offsets order_by_length
        pin_memory positions real requires_grad requires_grad_ reverse segment_ids select shape shift size split_at
        steps to to_arrow to_list to_nested to_numpy to_packed to_padded to_transformers tolist truncate type_as
        values windows with_values""".split()
    )
