"""Every layer of rl.nn as a module: arguments, parameters, copies and repr."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raglane as rl
from every_layer import GATED, KINDS, D, H, Kind, a_batch, assert_same, build, results_of
from raglane.cells import CELLS
from raglane.errors import ArgumentError, RaglaneError

LENGTHS = [2, 0, 3]
OURS = [kind for kind in KINDS if kind.layer not in ("RNN", "LSTM", "GRU")]


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_have_torchs_order(kind: Kind) -> None:
    # In torch's RNN the nonlinearity is before the bias.
    before = (kind.options.get("nonlinearity", "relu"),) if kind.layer in ("RNN", "IndRNN") else ()
    options = {} if before else kind.options
    layer = getattr(rl.nn, kind.layer)(D, H, 2, *before, False, True, 0.25, True, **options)
    given = (
        layer.input_size,
        layer.hidden_size,
        layer.num_layers,
        layer.bias,
        layer.batch_first,
        layer.dropout,
    )
    assert given == (D, H, 2, False, True, 0.25)
    assert layer.bidirectional is True
    plain = getattr(rl.nn, kind.layer)(D, H)
    assert (plain.num_layers, plain.bias, plain.batch_first, plain.dropout) == (1, True, False, 0.0)
    assert plain.bidirectional is False
    assert layer.training
    assert layer.weight_ih_l1.shape[1] == 2 * H
    if kind in OURS:
        placed = getattr(rl.nn, kind.layer)(
            D, H, 1, *before, True, False, 0.0, False, "meta", torch.bfloat16, **options
        )
        assert {(p.device.type, p.dtype) for p in placed.parameters()} == {("meta", torch.bfloat16)}


MISTYPED: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    *(((size, H), {}) for size in (3.0, "3", None, [3], torch.tensor(3))),
    *(((D, size), {}) for size in (4.0, "10", None, torch.tensor(4))),
    *(((D, H), {"num_layers": count}) for count in (1.0, "1")),
    *(((D, H), {"proj_size": size}) for size in (2.0, "2")),
    ((D, H), {"dtype": "float32"}),
    ((D, H), {"dtype": torch.int64}),
    *(((size, H), {}) for size in (0, -1)),
    *(((D, size), {}) for size in (0, -1)),
    *(((D, H), options) for options in ({"num_layers": 0}, {"dropout": 2.0}, {"dropout": "a"})),
    ((D, H), {"proj_size": H}),
]


@pytest.mark.parametrize(("sizes", "options"), MISTYPED)
def test_a_wrong_argument_raises_the_type_of_torch_and_ours(
    sizes: tuple[Any, ...], options: dict[str, Any]
) -> None:
    for name in ("LSTM",) if "proj_size" in options else ("RNN", "LSTM", "GRU"):
        with pytest.raises(Exception) as theirs:  # noqa: PT011
            getattr(nn, name)(*sizes, **options)
        with pytest.raises(ArgumentError, match=r"^\w+ must be .*, got .*\. \w") as ours:
            getattr(rl.nn, name)(*sizes, **options)
        if theirs.type is not AssertionError:
            assert isinstance(ours.value, theirs.type)


@pytest.mark.parametrize("kind", OURS)
def test_a_size_of_the_wrong_type_is_a_type_error_too(kind: Kind) -> None:
    for sizes in ((3.0, H), (D, "4")):
        with pytest.raises(TypeError) as raised:
            getattr(rl.nn, kind.layer)(*sizes, **kind.options)
        assert isinstance(raised.value, ArgumentError)


@pytest.mark.parametrize(("both", "bias"), [(True, False), (False, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_have_torchs_names(kind: Kind, both: bool, bias: bool) -> None:
    layer, cell = build(kind, 2, bidirectional=both, bias=bias), CELLS[kind.cell]
    expected: dict[str, tuple[int, ...]] = {}
    for index, width in enumerate((D, 2 * H if both else H)):
        shapes = (cell.above() if index else cell).shapes(width, H, bias)
        for suffix in ("", "_reverse")[: 2 if both else 1]:
            expected |= {
                f"{name}_l{index}{suffix}": shape
                for name, shape in shapes.items()
                if shape is not None
            }
    assert {
        name: tuple(parameter.shape) for name, parameter in layer.named_parameters()
    } == expected
    assert set(layer.state_dict()) == set(expected)
    assert all(
        parameter.requires_grad and bool(parameter.isfinite().all())
        for parameter in layer.parameters()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_the_weights(kind: Kind) -> None:
    torch.manual_seed(5)
    layer = build(kind, 2, initial_state="learned")
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    torch.manual_seed(5)
    assert_same(
        list(build(kind, 2, initial_state="learned").state_dict().values()),
        list(before.values()),
        0.0,
    )
    for parameter in layer.parameters():
        nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(5)
    layer.reset_parameters()
    assert_same(list(layer.state_dict().values()), list(before.values()), 0.0)


@pytest.mark.parametrize(
    "module",
    [
        rl.nn.GRU(D, H, initial_state="lengths"),
        rl.nn.Recurrent(nn.GRUCell, D, H, initial_state="learned"),
        rl.nn.CausalConv1d(D, H, 2),
        rl.nn.Attention(H, kdim=D),
        rl.transduction.AttentionDecoder(5, memory_size=D, hidden_size=H, attention="location"),
    ],
)
def test_modules_of_a_module_initialise_their_own_parameters(module: Any) -> None:
    for parameter in module.parameters():
        nn.init.constant_(parameter, torch.nan)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())


@pytest.mark.parametrize("kind", OURS)
def test_reset_parameters_leaves_a_module_for_the_initial_state(kind: Kind) -> None:
    start = nn.LSTM(D, H)  # its parameters have the names of a layer's
    before = [parameter.clone() for parameter in start.parameters()]
    build(kind, initial_state=start).reset_parameters()
    assert_same(list(start.parameters()), before, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_may_be_parametrized(kind: Kind) -> None:
    layer, batch = build(kind), a_batch(LENGTHS)
    plain = results_of(layer(batch))

    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    nn.utils.parametrize.register_parametrization(layer, "weight_ih_l0", Doubled())
    doubled = results_of(layer(batch))
    # Layer norm removes the scale of its products.
    assert torch.allclose(doubled[0], plain[0], atol=1e-2) == kind.cell.startswith("layernorm")
    nn.utils.parametrize.remove_parametrizations(layer, "weight_ih_l0")
    assert_same(results_of(layer(batch)), doubled)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_compute_the_same(kind: Kind) -> None:
    layer, batch = (
        build(kind, 2, bidirectional=True, schedule="lanes", initial_state="learned"),
        a_batch(LENGTHS),
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    wanted = results_of(layer(batch))

    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = build(kind, 2, bidirectional=True, schedule="lanes", initial_state="learned")
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (*copies, loaded):
        assert_same(results_of(other(batch)), wanted, 0.0)
        assert repr(other) == repr(layer)
        assert other.cell.name == layer.cell.name
    with torch.no_grad():
        copies[0].weight_ih_l0.zero_()
    assert_same(results_of(layer(batch)), wanted, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_repr(kind: Kind) -> None:
    assert repr(getattr(rl.nn, kind.layer)(D, H)) == f"{kind.layer}({D}, {H})"
    everything = build(
        kind, 2, bias=False, batch_first=True, dropout=0.5, bidirectional=True, zoneout=0.1
    )
    for part in (
        "num_layers=2",
        "bias=False",
        "batch_first=True",
        "dropout=0.5",
        "bidirectional=True",
        "zoneout=0.1",
    ):
        assert part in repr(everything)
    chosen = repr(build(kind, schedule="packed", backend="reference", initial_state="learned"))
    assert "schedule='packed', backend='reference', initial_state='learned'" in chosen


def test_repr_shows_a_layers_own_arguments() -> None:
    assert repr(rl.nn.IndRNN(D, H, 2)) == "IndRNN(3, 4, num_layers=2)"
    layer = rl.nn.IndRNN(D, H, nonlinearity="tanh", max_length=9)
    assert repr(layer) == "IndRNN(3, 4, nonlinearity='tanh', max_length=9)"
    assert repr(rl.nn.PeepholeLSTM(D, H, clip=2.5)) == "PeepholeLSTM(3, 4, clip=2.5)"
    assert repr(rl.nn.CoupledLSTM(D, H, clip=2.5)) == "CoupledLSTM(3, 4, clip=2.5)"


@pytest.mark.parametrize("kind", KINDS)
def test_explain(kind: Kind) -> None:
    layer, batch = build(kind), a_batch(LENGTHS)
    choice = rl.explain(layer, batch)
    assert choice.backend in ("cpu", "program", "torch", "triton", "reference")
    assert str(choice).startswith(
        f"backend {choice.backend}, schedule {choice.schedule}: auto takes the fastest"
    )
    if choice.backend in ("program", "reference"):
        assert f"{kind.cell!r}" in choice.reason  # the reason against other backends
    chosen = rl.explain(build(kind, backend="reference", schedule="lanes"), batch)
    assert (chosen.backend, chosen.schedule) == ("reference", "lanes")
    with rl.use_backend(backend="reference"):
        assert rl.explain(layer, batch, with_states=True).backend == "reference"


@pytest.mark.parametrize("kind", GATED)
def test_no_fast_kernel_takes_a_clipped_cell_for_the_plain_one(kind: Kind) -> None:
    choice = rl.explain(build(kind, clip=3.0), a_batch(LENGTHS))
    assert choice.backend in ("program", "reference")
    assert f"{kind.cell} clipped at 3.0" in choice.reason


@pytest.mark.parametrize("kind", OURS)
def test_torch_has_no_kernel_for_them(kind: Kind) -> None:
    layer = build(kind, backend="torch")
    for call in (lambda: layer(a_batch(LENGTHS)), lambda: rl.explain(layer, a_batch(LENGTHS))):
        with pytest.raises(ValueError, match=rf"torch has no kernel for the cell '{kind.cell}'"):
            call()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_numpy_are_numbers(kind: Kind) -> None:
    layer = getattr(rl.nn, kind.layer)(
        np.int64(D), np.int32(H), np.int64(2), dropout=np.float32(0.5), **kind.options
    )
    assert (type(layer.input_size), type(layer.hidden_size), type(layer.num_layers)) == (
        int,
        int,
        int,
    )
    assert layer(rl.Ragged([torch.randn(2, D)]))[0].values.shape == (2, H)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ({"input_size": 0}, "input_size must be .*got 0"),
        ({"hidden_size": "4"}, "hidden_size must be .*got '4'"),
        ({"num_layers": True}, "num_layers must be .*got True"),
        ({"bias": "relu"}, "bias must be .*got 'relu'"),
        ({"batch_first": 1}, "batch_first must be .*got 1"),
        ({"bidirectional": "yes"}, "bidirectional must be .*got 'yes'"),
        ({"dropout": 1.5}, r"dropout must be .*got 1\.5"),
        ({"dtype": torch.int64}, r"dtype must be .*got torch\.int64"),
        ({"foo": 7}, "foo must be .*got 7"),
        ({"backend": None}, "backend must be .*got None"),
    ],
)
@pytest.mark.parametrize("layer", ["GRU", "IndRNN"])
def test_wrong_arguments_are_named(layer: str, mistake: dict[str, Any], says: str) -> None:
    with pytest.raises(RaglaneError, match=says) as caught:
        getattr(rl.nn, layer)(**{"input_size": D, "hidden_size": H, **mistake})
    assert " must be " in str(caught.value)


@pytest.mark.parametrize(
    ("layer", "name", "values"),
    [
        ("LSTM", "proj_size", [-1, 4, True, 2.0, "2"]),
        ("IndRNN", "max_length", [0, -3, 2.5, True, "10"]),
        ("RNN", "nonlinearity", ["sigmoid", None, True]),
        ("IndRNN", "nonlinearity", ["sigmoid", None, True]),
        *((kind.layer, "clip", [0, -1.0, float("nan"), "5", [1.0]]) for kind in GATED),
        *((kind.layer, "clip", [3.0]) for kind in OURS if kind not in GATED),
    ],
)
def test_a_layers_own_arguments_are_named(layer: str, name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RaglaneError, match=f"{name} must be .*got "):
            getattr(rl.nn, layer)(D, H, **{name: value})


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_inputs_are_named(kind: Kind) -> None:
    layer, batch = build(kind), a_batch(LENGTHS)
    states = len(CELLS[kind.cell].states)
    wrong = torch.zeros(1, 2, H, dtype=torch.float64)
    for arguments, says in (
        ((rl.Ragged([torch.ones(2, D + 1, dtype=torch.float64)]),), f"input_size = {D}"),
        ((a_batch(LENGTHS, torch.float32),), r"\.to\(torch\.float64\)"),
        (([torch.ones(2, D)],), r"rl\.Ragged\(sequences\)"),
        (
            (batch, wrong if states == 1 else (wrong,) * states),
            r"hx \(h\) must be .*got shape \(1, 2, 4\)",
        ),
        ((batch, (wrong,) * (states + 1)), "hx must be .*got a tuple"),
        (
            (torch.ones(2, 3, D, dtype=torch.float64).to_sparse(),),
            r"input must be .*sparse_coo.* \.to_dense\(\)",
        ),
        (
            (torch.ones(2, 3, D, dtype=torch.float64, device="meta"),),
            "input must be .*got a tensor on meta",
        ),
    ):
        with pytest.raises(RaglaneError, match=says):
            layer(*arguments)
    for name in ("return_output",):
        with pytest.raises(RaglaneError, match=f"{name} must be .*got 1"):
            layer(batch, **{name: 1})
    for shape in ((2, 3, H), (1, 3, H + 1), (1,), (1, 1, 3, H)):
        state = torch.zeros(shape, dtype=torch.float64)
        with pytest.raises(RaglaneError, match=r"state must be .*\(1, B, 4\).*, got shape "):
            layer.final(None, state if states == 1 else (state,) * states)
    with pytest.raises(RaglaneError, match="bidirectional=False"):
        build(kind, bidirectional=True).step(torch.ones(D, dtype=torch.float64))
    with pytest.raises(RaglaneError, match="x_t"):
        layer.step([1.0])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool, torch.float64])
@pytest.mark.parametrize("kind", ["lstm", "cfc", "sru"])
def test_autocast_converts_no_other_dtypes(kind: str, dtype: torch.dtype) -> None:
    layer = build(kind, dtype=torch.float32)
    values = torch.ones(2, 3, D).to(dtype)
    for given in (values, rl.Ragged.from_flat(values[0], lengths=[1, 0, 2])):
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(ValueError, match=r"input must be .*got .*\.to\(torch\.float32"),
        ):
            layer(given)
    with torch.autocast("cpu", torch.bfloat16):
        assert build(kind)(a_batch(LENGTHS))[0].dtype is torch.float64


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    ("hx", "says"),
    [
        (torch.ones(1, 3, H), r"a tuple \(h, c\)"),
        ((None, None), r"a tuple \(h, c\)"),
        ((torch.ones(1, 2, H), torch.ones(1, 3, H)), r"hx \(h\).*\(1, 3, 4\)"),
        ((torch.ones(1, 3, H).double(),) * 2, r"hx \(h\).*float64"),
    ],
)
def test_a_wrong_state_is_named_for_tensors_and_packs(
    hx: Any, says: str, batch_first: bool
) -> None:
    layer = rl.nn.LSTM(D, H, batch_first=batch_first)
    inputs = torch.ones(3, 6, D) if batch_first else torch.ones(6, 3, D)
    for batch in (inputs, torch.nn.utils.rnn.pack_sequence([torch.ones(6, D)] * 3)):
        with pytest.raises((TypeError, ValueError), match=says):
            layer(batch, hx)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda layer: layer(torch.ones(6, 3, 7)), f"input_size = {D}"),
        (lambda layer: layer(rl.Ragged([torch.ones(2, D)]), lengths=[2]), "contains its lengths"),
        (lambda layer: layer(torch.ones(2, 3, D), lengths=[1, 4, 1]), "lengths"),
        (lambda layer: layer(torch.ones(3, D), lengths=[3]), r"\(T, B, D\)"),
        (lambda layer: layer(torch.ones(D)), r"\(T, D\)"),
        (
            lambda layer: layer(
                torch.nested.nested_tensor([torch.ones(2, D)], layout=torch.jagged)
            ),
            "from_nested",
        ),
        (lambda layer: layer.final(None, None), "state must be .*got a NoneType"),
    ],
)
def test_other_wrong_inputs_are_named(call: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        call(rl.nn.GRU(D, H))
