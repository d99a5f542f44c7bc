"""Every public function of tensors within ``torch.jit.trace``: right for other lengths, or
refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

import raglane as rl
from raglane import packing
from raglane.errors import DispatchError
from raglane.native import missing_kernels
from raglane.segments.indexing import place_rows

Call = Callable[[Tensor, Tensor], Any]

FEATURES = 6
EXAMPLE = [3, 0, 1, 2]
# The last ones have other sizes too.
OTHERS = [[1, 2, 3, 0], [2, 2, 1, 1], [0, 0, 6, 0], [4, 1, 0, 2, 2]]

pytestmark = [
    pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels())),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning"
    ),
]


def ragged(values: Tensor, lengths: Tensor) -> rl.Ragged:
    return rl.Ragged.from_flat(values, lengths=lengths)


def padded(values: Tensor, lengths: Tensor) -> Tensor:
    """Return a padded batch ``(B, 6, 3)``."""
    rows = torch.arange(1.0, 7.0).view(6, 1) * values[0, :3]
    return lengths.view(-1, 1, 1).add(1) * rows


def packed(values: Tensor, lengths: Tensor) -> rnn.PackedSequence:
    return rnn.pack_padded_sequence(padded(values, lengths), lengths.clamp(1, 6), True, False)


def split(values: Tensor) -> list[Tensor]:
    return [values[:2], values[2:]]


def tags(values: Tensor) -> Tensor:
    return values.argmax(1)


def targets(lengths: Tensor) -> rl.Ragged:
    """Return a target of one token per sequence."""
    return ragged(torch.ones_like(lengths), torch.ones_like(lengths))


def self_attention(values: rl.Ragged, log_decay: rl.Ragged) -> Any:
    """Return linear attention with the values as queries and keys too."""
    return rl.nn.linear_attention(values, values, values, log_decay)


def method(name: str, *args: Any, **options: Any) -> Call:
    return lambda v, n: getattr(ragged(v, n), name)(*args, **options)


def attribute(name: str) -> Call:
    return lambda v, n: getattr(ragged(v, n), name)


def built(name: str, *args: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    kind = getattr(rl.nn, name, None) or getattr(rl.transduction, name)
    module: nn.Module = kind(*args, **options)
    return module.requires_grad_(False)  # a trace refuses to make constants of trained weights


def layer(name: str, *args: Any, **options: Any) -> Call:
    module = built(name, *args, **options)
    return lambda v, n: module(ragged(v, n))


CAT: Any = torch.cat
MSE: Any = nn.functional.mse_loss
FIELD = built("CRF", FEATURES)
DECODER = built("AttentionDecoder", 4, FEATURES, 3)
TRANSDUCER = built("Transducer", 4, FEATURES, 3)
LSTM = built("LSTM", FEATURES, 2)
POOLING = built("AttentionPooling", FEATURES).eval()

RIGHT: dict[str, Call] = {
    "Ragged": lambda v, _: rl.Ragged(split(v)),
    **{
        f"Ragged.{name}": method(name)
        for name in ("first last sum mean reverse order_by_length detach exp".split())
    },
    **{
        f"Ragged.{name}": attribute(name)
        for name in "values offsets lengths lengths_cpu cu_seqlens segment_ids positions".split()
    },
    **{
        f"Ragged.{name}, steps": method(name, 1)
        for name in "sum logsumexp softmax log_softmax prod".split()
    },
    **{
        f"Ragged.{name}, last": method(name, -1)
        for name in "sum mean std logsumexp softmax cumsum argmax".split()
    },
    **{f"Ragged.{name}, empty": method(name, 1, empty=0.0) for name in "mean amax amin".split()},
    "Ragged.min": lambda v, n: ragged(v, n).min(-1).values,
    "Ragged, broadcast": lambda v, n: ragged(v, n) - ragged(v, n).mean(1, keepdim=True),
    "Ragged, a feature": lambda v, n: ragged(v, n)[..., 0],
    "torch.cat, last": lambda v, n: CAT([ragged(v, n), ragged(v, n)], -1),
    "torch.cat, sequences": lambda v, n: CAT([ragged(v, n), ragged(v, n)]),
    "torch.nn.functional.mse_loss": lambda v, n: MSE(ragged(v, n), ragged(v * 2, n)),
    "Ragged.flip": method("flip", 1),
    "Ragged.shift": method("shift", 1),
    "Ragged.shift, back": method("shift", -1),
    "Ragged.broadcast": lambda v, n: ragged(v, n).broadcast(n.double()),
    "Ragged.concat": lambda v, n: ragged(v, n).concat(ragged(v * 2, n.flip(0))),
    "Ragged.map": method("map", torch.relu),
    "Ragged, operators": lambda v, n: ragged(v, n) * 2 + ragged(v, n).exp(),
    "Ragged.with_values": lambda v, n: ragged(v, n).with_values(v * 2),
    "Ragged.to": method("to", torch.float64),
    "Ragged.from_flat": lambda v, n: rl.Ragged.from_flat(
        v, offsets=nn.functional.pad(n.cumsum(0), (1, 0))
    ),
    "Ragged.from_padded, mask": lambda v, n: rl.Ragged.from_padded(
        padded(v, n), mask=torch.arange(6) < n[:, None]
    ),
    "rl.collate": lambda v, _: rl.collate([{"x": part} for part in split(v)]),
    "rl.lens.modify": lambda v, n: rl.lens.modify({"x": ragged(v, n)})["x"].apply(lambda r: r * 2),
    **{
        f"rl.nn.Pooling, {name}": layer("Pooling", name)
        for name in "last first mean max logsumexp".split()
    },
    "rl.nn.AttentionPooling": layer("AttentionPooling", FEATURES, 2),
    "rl.nn.AttentionPooling, eval": lambda v, n: POOLING.weights(ragged(v, n)),  # type: ignore[operator]
    "rl.nn.LSTM.final": lambda v, n: LSTM.final(None, (n.view(1, -1, 1) * v[:1, :2],) * 2),  # type: ignore[operator]
    "rl.nn.CRF": lambda v, n: FIELD(ragged(v, n), ragged(tags(v), n)),
    "rl.nn.CRF.loss": lambda v, n: FIELD.loss(ragged(v, n), ragged(tags(v), n)),  # type: ignore[operator]
    "rl.nn.CRF.score": lambda v, n: FIELD.score(ragged(v, n), ragged(tags(v), n)),  # type: ignore[operator]
    "rl.nn.CRF.decode": lambda v, n: FIELD.decode(ragged(v, n)),  # type: ignore[operator]
    "rl.nn.CRF.marginals": lambda v, n: FIELD.marginals(ragged(v, n)),  # type: ignore[operator]
    "rl.nn.CRF.log_partition": lambda v, n: FIELD.log_partition(ragged(v, n)),  # type: ignore[operator]
    "rl.nn.CRF.log_likelihood": lambda v, n: FIELD.log_likelihood(ragged(v, n), ragged(tags(v), n)),  # type: ignore[operator]
    "rl.transduction.ctc_loss": lambda v, n: rl.transduction.ctc_loss(
        ragged(v.log_softmax(1), n), targets(n), zero_infinity=True
    ),
}

REFUSED: dict[str, Call] = {
    "pack_padded_sequence": lambda v, n: packing.pack_padded_sequence(padded(v, n), n, True, False),
    "pad_packed_sequence": lambda v, n: packing.pad_packed_sequence(packed(v, n)),
    "pad_sequence": lambda v, _: packing.pad_sequence(split(v)),
    "unpad_sequence": lambda v, n: packing.unpad_sequence(padded(v, n), n, True),
    "pack_sequence": lambda v, _: packing.pack_sequence(split(v), enforce_sorted=False),
    "unpack_sequence": lambda v, n: packing.unpack_sequence(packed(v, n)),
    "invert_permutation": lambda _, n: packing.invert_permutation(n.argsort()),
    **{
        f"Ragged.{name}": method(name)
        for name in "mask to_list to_padded to_packed to_nested to_transformers to_numpy".split()
    },
    "Ragged.split_at": lambda v, n: ragged(v, n).split_at(ragged(v[:, 0] > 0, n)),
    "Ragged.steps": lambda v, n: [x_t for _, x_t in ragged(v, n).steps()],
    "Ragged.from_steps": lambda v, _: rl.Ragged.from_steps([v[:2], v[:2]]),
    "Ragged.to_arrow": method("to_arrow"),
    "Ragged.max_length": attribute("max_length"),
    "Ragged.density": attribute("density"),
    "Ragged.truncate": method("truncate", 2),
    "Ragged.windows": method("windows", 2),
    "Ragged.cumsum": method("cumsum", 1),
    "Ragged.max": lambda v, n: ragged(v, n)[n > 0].max(1),
    "Ragged, steps": lambda v, n: ragged(v, n)[:, 1:],
    "Ragged.select": method("select", [2, 0]),
    "Ragged, index": method("__getitem__", 2),
    "Ragged, slice": method("__getitem__", slice(1, 3)),
    "Ragged, list": lambda v, n: list(ragged(v, n)),
    "Ragged.from_padded": lambda v, n: rl.Ragged.from_padded(padded(v, n), n),
    "Ragged.from_padded, left": lambda v, n: rl.Ragged.from_padded(
        padded(v, n), n, padding_side="left"
    ),
    "Ragged.from_packed": lambda v, n: rl.Ragged.from_packed(packed(v, n)),
    **{
        f"rl.nn.{name}": layer(name, FEATURES, 3)
        for name in (
            "RNN LSTM GRU IndRNN SRU QRNN MinGRU MinLSTM PeepholeLSTM CoupledLSTM SLSTM GRUD CfC"
            " LayerNormLSTM LayerNormGRU SequenceEncoder Mamba Mamba2 GatedDeltaNet MLSTM RGLRU"
        ).split()
    },
    "rl.nn.selective_scan": lambda v, n: rl.nn.selective_scan(
        ragged(v, n), ragged(v.abs(), n), -torch.ones(FEATURES, 2), *[ragged(v[:, :2], n)] * 2
    ),
    "rl.nn.linear_attention": lambda v, n: self_attention(
        ragged(v.view(-1, 2, 3), n), ragged(-v[:, :2].abs(), n)
    ),
    "rl.nn.Recurrent": lambda v, n: rl.nn.Recurrent(nn.GRUCell(FEATURES, 2))(ragged(v, n)),
    "rl.nn.CausalConv1d": layer("CausalConv1d", FEATURES, 2, 3),
    "rl.nn.Conv1d": layer("Conv1d", FEATURES, 2, 3),
    "rl.nn.MaxPool1d": layer("MaxPool1d", 2),
    "rl.nn.AvgPool1d": layer("AvgPool1d", 2),
    "rl.nn.LSTM.step": lambda v, _: LSTM.step(v),  # type: ignore[operator]
    "rl.nn.Attention": layer("Attention", FEATURES, 2),
    "rl.transduction.ctc_align": lambda v, n: (
        rl.transduction.ctc_align(ragged(v.log_softmax(1), n), ragged(tags(v)[:0], n * 0)).scores
    ),
    "rl.transduction.ctc_greedy_search": lambda v, n: rl.transduction.ctc_greedy_search(
        ragged(v, n)
    ),
    "rl.transduction.CTCBeamSearch": lambda v, n: rl.transduction.CTCBeamSearch()(
        ragged(v.log_softmax(1), n)
    ),
    "rl.transduction.rnnt_loss": lambda v, n: rl.transduction.rnnt_loss(
        ragged(v.repeat_interleave(2, 0), n * 2), None, targets(n)
    ),
    "rl.transduction.Transducer": lambda v, n: TRANSDUCER(ragged(v, n), targets(n)),
    "rl.transduction.Transducer.loss": lambda v, n: TRANSDUCER.loss(ragged(v, n), targets(n)),  # type: ignore[operator]
    "rl.transduction.Transducer.decode": lambda v, n: TRANSDUCER.decode(ragged(v, n)),  # type: ignore[operator]
    "rl.transduction.AttentionDecoder": lambda v, n: DECODER(ragged(v, n), targets(n)),
    "rl.transduction.AttentionDecoder.loss": lambda v, n: DECODER.loss(ragged(v, n), targets(n)),  # type: ignore[operator]
    "rl.transduction.AttentionDecoder.decode": lambda v, n: DECODER.decode(
        ragged(v, n), beam_size=2, max_length=3
    ),  # type: ignore[operator]
    "rl.transduction.beam_search": lambda v, n: rl.transduction.beam_search(
        lambda tokens, state: (v[:1].log_softmax(1).expand(len(tokens), -1), state),
        n,
        n,
        beam_size=2,
        max_length=3,
        end=0,
    ),
    "rl.transduction.soft_dtw": lambda v, n: rl.transduction.soft_dtw(
        ragged(v, n), ragged(v, n.flip(0))
    ),
    "rl.transduction.edit_distance": lambda v, n: (
        rl.transduction.edit_distance(ragged(tags(v), n), ragged(tags(v), n.flip(0))).total
    ),
    "rl.transduction.NGram": lambda v, n: rl.transduction.NGram(
        ragged(tags(v), n), num_tokens=FEATURES
    )(ragged(tags(v), n), n),
    "rl.data.mark_missing": lambda v, n: rl.data.mark_missing(ragged(v, n)),
}

# Not computed from tensors, or not possible in a trace.
WITHOUT_TENSORS = set("feature_shape PackedSequence init".split())
ELSEWHERE = {
    "from_nested",  # torch traces no nested tensor
    "from_arrow",  # reads no tensor
}


def test_every_public_function_is_tried() -> None:
    tried = {part for name in (*RIGHT, *REFUSED) for part in re.split(r"[., ]+", name)}
    # Functions and attributes of torch are in tests/face; some of each kind are tried here too.
    public = {name for name in dir(rl.Ragged) if not name.startswith("_")} - {*dir(Tensor)}
    public |= {*rl.nn.__all__, *rl.transduction.__all__, *packing.__all__}
    assert public - tried == WITHOUT_TENSORS | ELSEWHERE


def leaves(result: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a result."""
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, rl.Ragged):
        return result.values, result.offsets
    parts = result.values() if isinstance(result, dict) else result
    return tuple(leaf for part in parts for leaf in leaves(part))


def draw(lengths: list[int]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(sum(lengths) + lengths[0])
    return torch.randn(sum(lengths), FEATURES), torch.tensor(lengths)


def traced(call: Call) -> Any:
    """Trace a function on the example."""
    return torch.jit.trace(
        lambda values, lengths: leaves(call(values, lengths)), draw(EXAMPLE), check_trace=False
    )


def gradients(parts: tuple[Tensor, ...], values: Tensor) -> list[Tensor]:
    """Return the gradients of the differentiable parts of a result."""
    differentiable = [part.sin().sum() for part in parts if part.requires_grad]
    return [torch.autograd.grad(part, values, retain_graph=True)[0] for part in differentiable]


@pytest.mark.parametrize("name", RIGHT)
def test_a_trace_is_right_for_other_lengths(name: str) -> None:
    """The numbers, and the gradients of the values, are those without a trace."""
    trace = traced(RIGHT[name])
    for lengths in (EXAMPLE, *OTHERS):
        values, counts = draw(lengths)
        values.requires_grad_()
        found, wanted = (leaves(function(values, counts)) for function in (trace, RIGHT[name]))
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(gradients(found, values), gradients(wanted, values))


@pytest.mark.parametrize("name", REFUSED)
def test_a_trace_is_refused(name: str) -> None:
    """Before anything is computed by the kernels or NumPy, whose results a trace would repeat."""
    REFUSED[name](*draw(EXAMPLE))
    fix = r"(Trace the function of torch\.nn\.utils|Call it outside of the trace|Use torch\.export)"
    with pytest.raises(DispatchError, match=rf"^torch\.jit\.trace must be .*, got .*\. {fix}"):
        traced(REFUSED[name])


def test_a_trace_of_the_packing_functions_of_torch_is_right() -> None:
    """The fix of the messages works."""

    def call(values: Tensor, lengths: Tensor) -> Tensor:
        both = rnn.pad_packed_sequence(packed(values, lengths), batch_first=True)
        return torch.cat(rnn.unpad_sequence(*both, batch_first=True))

    trace = torch.jit.trace(call, draw(EXAMPLE), check_trace=False)
    for lengths in OTHERS[:3]:
        torch.testing.assert_close(trace(*draw(lengths)), call(*draw(lengths)))


def test_placed_rows_of_a_trace_are_written() -> None:
    """Also if the example leaves no row free."""
    trace = torch.jit.trace(
        lambda rows, index: place_rows(rows, index, 4, 7.0),
        (torch.ones(4, 2), torch.tensor([2, 0, 3, 1])),
        check_trace=False,
    )
    placed = trace(torch.ones(2, 2), torch.tensor([2, 0]))
    assert placed.tolist() == [[1, 1], [7, 7], [1, 1], [7, 7]]
