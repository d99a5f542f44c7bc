"""The choice of backend and schedule, its reason, and the ways to override it."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from abc import ABC, abstractmethod
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils import _pytree as pytree

import raglane as rl
from every_layer import watch_backends
from raglane.cells import CELLS
from raglane.errors import ArgumentTypeError, DispatchError
from raglane.kernels.contract import Traits
from raglane.kernels.dispatch import BACKENDS, choose
from raglane.native import missing_kernels

# What auto takes here: the cpu kernels, or where they are missing torch's.
FASTEST = ("torch", "packed") if missing_kernels() else ("cpu", "lanes")


def a_batch() -> rl.Ragged:
    return rl.Ragged([torch.randn(3, 5), torch.randn(2, 5)])


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, FASTEST),
        ({"backend": "torch"}, ("torch", "packed")),
        ({"schedule": "padded"}, ("torch", "padded")),
        ({"schedule": "masked"}, ("reference", "masked")),
        ({"schedule": "lanes"}, ("reference" if missing_kernels() else "cpu", "lanes")),
        ({"schedule": "each"}, ("reference", "each")),
        ({"backend": "reference"}, ("reference", "packed")),
        ({"backend": "reference", "schedule": "padded"}, ("reference", "padded")),
    ],
)
def test_naming_one_resolves_the_other(chosen: dict[str, Any], expected: tuple[str, str]) -> None:
    choice = rl.explain(rl.nn.LSTM(5, 4, **chosen), a_batch())
    assert (choice.backend, choice.schedule) == expected
    with rl.use_backend(**chosen):
        choice = rl.explain(rl.nn.LSTM(5, 4), a_batch())
    assert (choice.backend, choice.schedule) == expected


@pytest.mark.parametrize(
    ("layer", "options", "backend"),
    [
        ("LSTM", {}, "torch"),
        (
            "LSTM",
            {"proj_size": 2, "num_layers": 2, "bidirectional": True, "initial_state": "learned"},
            "torch",
        ),
        ("GRU", {}, "torch"),
        ("RNN", {}, "torch"),
        ("RNN", {"clip": 1.0}, "reference"),
        ("GRU", {"reset_after": False}, "reference"),
        ("LSTM", {"zoneout": 0.1}, "reference"),
        ("MinGRU", {}, "reference"),
        ("LayerNormLSTM", {}, "reference"),
    ],
)
def test_backends_of_other_devices_than_a_cpu(
    layer: str, options: dict[str, Any], backend: str
) -> None:
    """As in docs/on-a-gpu.md."""
    batch = rl.Ragged.from_flat(torch.empty(5, 3, device="meta"), lengths=[3, 2])
    assert (
        rl.explain(getattr(rl.nn, layer)(3, 4, device="meta", **options), batch).backend == backend
    )


@pytest.mark.parametrize(
    ("units", "kind", "where", "backend"),
    [
        (128, "flat", "cuda", "triton"),
        (129, "flat", "cuda", "torch"),
        (128, "packed", "cuda", "torch"),
        (128, "dense", "cuda", "torch"),
        (128, "flat", "meta", "torch"),
    ],
)
def test_on_a_gpu_the_size_of_the_state_decides(
    units: int, kind: Any, where: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BACKENDS["triton"], "refuses", lambda *_: None)
    traits = Traits(CELLS["gru"], 3, units, torch.float32, torch.device(where))
    assert choose(traits, kind=kind).backend == backend
    assert choose(traits, backend="torch", kind=kind).backend == "torch"


def test_reasons_are_words() -> None:
    layer = rl.nn.GRU(5, 4)
    assert "auto" in rl.explain(layer, a_batch()).reason
    packed = rl.nn.GRU(5, 4, schedule="packed")
    assert "states of every step" in rl.explain(packed, a_batch(), with_states=True).reason
    with rl.use_backend(backend="reference"):
        assert "backend reference chosen by rl.use_backend" in str(rl.explain(layer, a_batch()))
    named = rl.nn.GRU(5, 4, schedule="lanes")
    assert "schedule lanes chosen for this layer" in rl.explain(named, a_batch()).reason
    assert "schedule='lanes'" in repr(named)


def test_kinds_of_input() -> None:
    layer = rl.nn.GRU(5, 4, backend="torch")
    padded, lengths = a_batch().to_padded(batch_first=False)
    assert rl.explain(layer, padded).schedule == "padded"
    assert rl.explain(layer, padded, lengths=lengths).schedule == "packed"
    assert rl.explain(layer, a_batch().to_packed()).schedule == "packed"


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"schedule": "fast"}, "each, padded, masked, packed, lanes"),
        ({"schedule": ["packed"]}, r"schedule must be .*got \['packed'\]"),
        ({"backend": "gpu"}, "torch, triton, reference"),
        (
            {"schedule": "lanes", "backend": "torch"},
            r"the backend torch, which runs packed, padded.*\(lanes, reference\)",
        ),
    ],
)
def test_unknown_names(chosen: dict[str, Any], says: str) -> None:
    with pytest.raises(DispatchError, match=says):
        rl.nn.LSTM(5, 4, **chosen)
    with pytest.raises(ValueError, match=says), rl.use_backend(**chosen):
        pass


def test_torch_has_no_states_of_every_step() -> None:
    with pytest.raises(DispatchError, match="states of every step"):
        rl.nn.LSTM(5, 4, backend="torch").with_states(a_batch())


def test_the_override_ends_with_its_block_and_stays_in_its_thread() -> None:
    layer, batch = rl.nn.RNN(5, 4), a_batch()
    seen = []
    with rl.use_backend(backend="reference"):
        thread = threading.Thread(target=lambda: seen.append(rl.explain(layer, batch).backend))
        thread.start()
        thread.join()
        with rl.use_backend(schedule="lanes"):
            assert rl.explain(layer, batch).schedule == "lanes"
        assert rl.explain(layer, batch).backend == "reference"
    assert seen == [FASTEST[0]]
    assert rl.explain(layer, batch).backend == FASTEST[0]
    with rl.use_backend(schedule="lanes"):
        with pytest.raises(ZeroDivisionError), rl.use_backend(backend="reference", schedule="each"):
            raise ZeroDivisionError
        assert rl.explain(layer, batch).schedule == "lanes"


@pytest.mark.parametrize("layer", [nn.LSTM(5, 4), nn.Linear(5, 4)])
def test_explains_only_our_layers(layer: nn.Module) -> None:
    with pytest.raises(ArgumentTypeError, match=r"rl\.accelerate"):
        rl.explain(layer, a_batch())
    for wrong, text in (([1, 2], "got a list"), (a_batch(), "lengths must be None")):
        with pytest.raises(ArgumentTypeError, match=text):
            rl.explain(rl.nn.LSTM(5, 4), wrong, lengths=[1, 2])


class Tagger(nn.Module):
    """A model as people write it, with torch's layers and packing."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(5, 4, bidirectional=True)
        self.decoder = nn.GRU(8, 3, batch_first=True)
        self.cell = nn.GRUCell(3, 3)

    def forward(self, inputs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, enforce_sorted=False)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.encoder(packed)[0], batch_first=True)
        return self.decoder(padded)[0]


def test_accelerate_keeps_the_model() -> None:
    model = Tagger()
    encoder, weight = model.encoder, model.encoder.weight_ih_l0
    calls: list[Any] = []
    model.encoder.register_forward_hook(lambda *_: calls.append(1))
    inputs, lengths = torch.randn(6, 3, 5), torch.tensor([4, 6, 1])
    expected = model(inputs, lengths)
    before = rl.explain(model)
    assert (before.replaced, list(before.left)) == ([], ["cell"])
    assert rl.accelerate(model) is model
    report = rl.explain(model)
    assert report.replaced == ["encoder", "decoder"]
    assert "2 layers replaced: encoder, decoder" in str(report)
    assert "cell (GRUCell is a cell" in str(report)
    assert "the model itself (it is a layer of rl.nn; rl.explain(layer, batch)" in str(
        rl.explain(rl.nn.GRU(3, 4))
    )
    assert model.encoder is encoder
    assert isinstance(model.encoder, rl.nn.LSTM)
    assert model.encoder.weight_ih_l0 is weight
    torch.testing.assert_close(model(inputs, lengths), expected)
    assert len(calls) == 2
    assert isinstance(
        model.encoder(rl.Ragged.from_padded(inputs, lengths, batch_first=False))[0], rl.Ragged
    )
    assert rl.explain(rl.accelerate(model)) == report
    assert rl.to_torch(model) is model
    assert model.encoder is encoder
    assert (type(model.encoder), type(model.decoder)) == (nn.LSTM, nn.GRU)
    assert model.encoder.weight_ih_l0 is weight
    assert set(vars(model.encoder)) == set(vars(nn.LSTM(5, 4)))
    torch.testing.assert_close(model(inputs, lengths), expected)
    assert len(calls) == 4


class Flexible(ABC, nn.RNNBase):
    """A layer for sequences of length 0, in the form of those of pytorch-forecasting."""

    @abstractmethod
    def start(self, padded: torch.Tensor) -> Any: ...

    @torch.no_grad()  # which wraps it
    def forward(self, padded: Any, hx: Any = None, lengths: Any = None) -> Any:
        if lengths is None:
            return super().forward(padded, hx)
        pack, order = (
            nn.utils.rnn.pack_padded_sequence,
            {"batch_first": True, "enforce_sorted": False},
        )
        out, h = super().forward(pack(padded, lengths.clamp(min=1), **order), hx=hx)
        return nn.utils.rnn.pad_packed_sequence(out, True)[0], torch.where(
            lengths[:, None] > 0, h, self.start(padded)
        )


class FlexibleGRU(Flexible, nn.GRU):
    def start(self, padded: torch.Tensor) -> Any:
        return padded.new_zeros(self.num_layers, len(padded), self.hidden_size)


class NamedLSTM(nn.LSTM):
    """A layer with another constructor."""

    def __init__(self, name: str) -> None:
        super().__init__(5, 4, batch_first=True)
        self.name = name

    def shout(self) -> str:
        return self.name.upper()


@pytest.mark.parametrize(
    "make", [lambda: FlexibleGRU(5, 4, 2, batch_first=True), lambda: NamedLSTM("a")]
)
def test_accelerate_keeps_the_methods_of_a_subclass(make: Any) -> None:
    layer, padded = make(), torch.randn(3, 6, 5)
    kind, pack = type(layer), rl.Ragged([torch.randn(2, 5), torch.randn(3, 5)]).to_packed()
    calls: list[dict[str, Any]] = [{"input": padded}, {"input": pack}]
    if kind is FlexibleGRU:
        calls = [
            {"padded": padded},
            {"padded": pack},
            {"padded": padded, "lengths": torch.tensor([4, 0, 6])},
        ]
    expected = [pytree.tree_leaves(layer(**call)) for call in calls]
    assert rl.accelerate(layer) is layer
    assert (isinstance(layer, kind), isinstance(layer, _RAGGED[kind])) == (True, True)
    with rl.use_backend(backend="reference"):
        assert rl.explain(layer, padded).backend == "reference"
    for same in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(same) is type(layer)
        for call, wanted in zip(calls, expected, strict=True):
            torch.testing.assert_close(pytree.tree_leaves(same(**call)), wanted)
    assert isinstance(layer(rl.Ragged([torch.randn(2, 5), torch.randn(0, 5)]))[0], rl.Ragged)
    assert layer.start(padded).shape == (2, 3, 4) if kind is FlexibleGRU else layer.shout() == "A"
    assert type(rl.accelerate(make())) is type(layer)
    assert type(rl.to_torch(layer)) is kind
    torch.testing.assert_close(pytree.tree_leaves(layer(**calls[0])), expected[0])


_RAGGED = {FlexibleGRU: rl.nn.GRU, NamedLSTM: rl.nn.LSTM}


@pytest.mark.parametrize(
    ("body", "on_instance", "reason"),
    [
        ({"forward": lambda *_: None}, {}, "the forward of Own does not call super().forward"),
        (
            {"forward": lambda self, x: nn.LSTM.forward(self, x)},
            {},
            "the forward of Own does not call super().forward",
        ),
        ({"permute_hidden": lambda _, hx, __: hx}, {}, "Own overrides permute_hidden"),
        ({"step": None}, {}, "Own has an attribute step, as Raglane's layers do"),
        ({}, {"cell": "lstm"}, "Own has an attribute cell, as Raglane's layers do"),
        ({}, {"_modules": {"cell": None}}, "Own has an attribute cell, as Raglane's layers do"),
        ({"__getattr__": nn.Module.__getattr__}, {}, "Own overrides __getattr__"),
        ({}, {"check_input": None}, "Own overrides check_input"),
        ({}, {"forward": lambda *_: None}, "its forward was replaced on the instance"),
    ],
)
def test_accelerate_leaves_a_subclass_that_changes_the_computation(
    body: dict[str, Any], on_instance: dict[str, Any], reason: str
) -> None:
    own = type("Own", (nn.LSTM,), body)(5, 4)
    vars(own).update(on_instance)
    with pytest.warns(
        UserWarning, match=rf"did not convert a layer\. the model itself: {re.escape(reason)}\.$"
    ):
        rl.accelerate(own)
    assert type(own).__name__ == "Own"


def test_accelerate_a_layer_itself_and_reports_by_reason() -> None:
    layer = rl.accelerate(nn.LSTM(5, 4))
    assert isinstance(layer, rl.nn.LSTM)
    assert str(rl.explain(layer)) == "1 layer replaced: the model itself"
    model = nn.Sequential(*[nn.GRUCell(2, 2) for _ in range(30)], nn.RNNBase("LSTM", 2, 3))
    assert [line.rpartition(" (")[0] for line in str(rl.explain(model)).splitlines()[1:]] == [
        f"not converted: {', '.join(map(str, range(20)))} and 10 more",
        "not converted: 30",
    ]
    functions: list[Any] = [rl.accelerate, rl.explain, rl.to_torch]
    for function in functions:
        with pytest.raises(ArgumentTypeError, match=r"torch\.nn\.Module"):
            function([nn.LSTM(5, 4)])
    parametrizations.weight_norm(layer, "weight_hh_l0")
    with pytest.raises(ArgumentTypeError, match="remove_parametrizations"):
        rl.to_torch(layer)
    parametrize.remove_parametrizations(layer, "weight_hh_l0")
    assert type(rl.to_torch(layer)) is nn.LSTM


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(5, 4),
        lambda: nn.GRU(5, 4),
        lambda: nn.RNN(5, 4),
        lambda: FlexibleGRU(5, 4, batch_first=True),
        lambda: NamedLSTM("a"),
    ],
)
def test_a_closure_over_the_converted_forward_survives_to_torch(make: Any) -> None:
    layer, padded = make(), torch.randn(3, 6, 5)
    kind = type(layer)
    expected = pytree.tree_leaves(layer(padded))
    converted = rl.accelerate(layer).forward
    layer.forward = lambda *args: converted(*args)
    torch.testing.assert_close(pytree.tree_leaves(layer(padded)), expected)
    assert type(rl.to_torch(layer)) is kind
    torch.testing.assert_close(pytree.tree_leaves(layer(padded)), expected, rtol=0, atol=0)
    del layer.forward
    torch.testing.assert_close(pytree.tree_leaves(layer(padded)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_spectral_norm_in_training_is_torchs(kind: str, is_first: bool) -> None:
    """Each reading of a weight in training is a power iteration, so the count of readings counts."""

    def normalised(layer: Any) -> Any:
        for name in ("weight_ih_l0", "weight_hh_l1"):
            torch.manual_seed(1)
            parametrizations.spectral_norm(layer, name)
            vectors = layer.parametrizations[name][0]
            vectors._u.copy_(torch.eye(len(vectors._u), dtype=torch.float64)[0])
        return layer

    theirs = getattr(nn, kind)(5, 4, 2, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    ours = rl.accelerate(normalised(ours)) if is_first else normalised(rl.accelerate(ours))
    normalised(theirs)
    padded = torch.randn(3, 6, 5, dtype=torch.float64)
    for is_training in (True, True, False, True):
        theirs.train(is_training)
        ours.train(is_training)
        results = [pytree.tree_leaves(layer(padded)) for layer in (ours, theirs)]
        torch.testing.assert_close(*results, rtol=0, atol=1e-12)
        with parametrize.cached():
            for _ in range(2):
                results = [pytree.tree_leaves(layer(padded)) for layer in (ours, theirs)]
                torch.testing.assert_close(*results, rtol=0, atol=1e-12)
        gradients = []
        for layer in (ours, theirs):
            layer.zero_grad()
            layer(padded)[0].sin().sum().backward()
            gradients.append([parameter.grad for parameter in layer.parameters()])
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
        for (name, vector), (_, other) in zip(
            ours.named_buffers(), theirs.named_buffers(), strict=True
        ):
            torch.testing.assert_close(vector, other, rtol=0, atol=1e-12, msg=name)
        copy.deepcopy(ours)


class Gated(nn.LSTM):
    """A layer with a module of its own."""

    def __init__(self) -> None:
        super().__init__(5, 4)
        self.gate = nn.Linear(4, 7)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, Gated])
def test_reset_parameters_is_torchs(kind: Any) -> None:
    theirs = kind() if kind is Gated else kind(5, 4)
    ours = rl.accelerate(copy.deepcopy(theirs))
    for layer in (theirs, ours):
        torch.manual_seed(3)
        layer.reset_parameters()
    for (name, parameter), (_, other) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert torch.equal(parameter, other), name


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "SRU"])
def test_auto_chooses_alike_for_every_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """rl.explain reports what runs, which depends on neither the number of sequences nor their
    lengths.
    """
    ran = watch_backends(monkeypatch)
    layer = getattr(rl.nn, kind)(5, 4)
    explained = set()
    for lengths in ([1], [3], [200], [4, 4], [1] * 70, [0], [0, 0], [300, 1, 0]):
        batch = rl.Ragged.from_flat(torch.randn(sum(lengths), 5), lengths=lengths)
        for run_grad in (False, True):
            with torch.set_grad_enabled(run_grad):
                layer(batch)
                layer(batch.to_packed())
        choice = rl.explain(layer, batch)
        explained.add((choice.backend, choice.schedule))
    assert len(explained) == 1
    assert set(ran) == explained
