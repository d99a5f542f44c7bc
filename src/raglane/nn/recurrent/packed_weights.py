"""Packs the weights of recurrent layers once, for inference."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from raglane._utils.checks import check_model
from raglane.cells.module import ModuleCell
from raglane.errors import ArgumentError, DispatchError
from raglane.kernels.contract import Traits
from raglane.kernels.cpu.layer import layer_of
from raglane.kernels.cpu.prepared import PreparedProgram, prepared_product
from raglane.kernels.dispatch import pick
from raglane.native.library import cell_facts
from raglane.nn.recurrent.stack import Stack, plans

M = TypeVar("M", bound=torch.nn.Module)

# The longest row of int8 weights whose sum of products fits 32 bits, as in csrc/abi/raglane.h.
_LONGEST_INT8_ROW = 65536


def pack_weights(model: M) -> M:
    """Pack the weights of a model's recurrent layers once, for inference, instead of in every call.

    The cpu kernels read weights in their own order, and rearrange them at the beginning of each
    call. With few elements this takes most of the time: in
    :meth:`~raglane.nn.recurrent.layer.RecurrentLayer.step`, or for a short batch on a wide layer. A
    layer with packed weights gives the same bits, and needs memory for a second copy of them.

    The packed weights are used in calls that record no gradients (within ``torch.no_grad()`` or
    ``torch.inference_mode()``, or if no weight requires a gradient) and outside of autocast and
    ``torch.compile``. They are discarded when a weight changes: by an optimizer,
    ``load_state_dict``, an in-place operation, ``.data = ...`` or ``.to(...)``. The layer then runs
    as before. Changes that PyTorch does not record are NOT detected: writes to ``weight.data`` in
    place, by the functional form of a fused optimizer, through a NumPy array, or from another
    process that shares the memory. Call ``rl.pack_weights`` again after such a change. Copies and
    pickles have no packed weights. :func:`raglane.explain` shows whether a layer has.

    Args:
        model: any module, or one recurrent layer of ``rl.nn``. Layers are skipped if the cpu
            kernels do not run them, or if their weights are computed in each call
            (parametrizations).

    Returns:
        ``model``.

    Raises:
        ArgumentTypeError: ``model`` is not a module.
        DispatchError: the weights of no layer can be packed; the message gives the reason.

    Example:
        >>> layer = rl.pack_weights(rl.nn.LSTM(3, 4).eval())
        >>> with torch.inference_mode():
        ...     out, state = layer.step(torch.randn(3))
        >>> out.shape
        torch.Size([4])
    """
    _pack_all(model, None)
    return model


def quantize(model: M) -> M:
    """Round the weights of a model's RNN, LSTM and GRU layers to int8 for inference, in place.

    The int8 weights are packed as by :func:`pack_weights`, and used in the same calls until a
    weight changes. They need a quarter of the memory, and a wide layer runs two to three times as
    fast on processors with int8 instructions (VNNI). Numbers are rounded to 255 levels: each row of
    a weight matrix with its own scale, and likewise each element's input and each state when it is
    read. The bits of a sequence still do not depend on its batch or the number of threads, but
    differ from float32. An infinity or NaN in an input or state gives NaN. Biases, states, outputs,
    ``state_dict`` and the weights themselves do not change. In training mode, and in calls that do
    not use packed weights, the float32 weights run.

    Args:
        model: as for :func:`pack_weights`, in evaluation mode, with layers of float32 weights. A
            warning names the layers that were not converted.

    Returns:
        ``model``.

    Raises:
        ArgumentTypeError: ``model`` is not a module.
        ArgumentError: the model is in training mode.
        DispatchError: no layer of the model can be quantised; the message gives the reason.

    Example:
        >>> layer = rl.quantize(rl.nn.LSTM(3, 4).eval())
        >>> print(rl.explain(layer, rl.Ragged([torch.randn(2, 3)])).reason.split("; ")[1])
        quantised: its weights are int8 in calls that record no gradients
    """
    check_model(model)
    if any(layer.training for layer in model.modules() if isinstance(layer, Stack)):
        rule = "in evaluation mode, since int8 weights are for inference"
        raise ArgumentError("model", "a model in training mode", rule, "call model.eval() first")
    reasons = _pack_all(model, torch.int8)
    left = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
    if left:
        warnings.warn(f"rl.quantize did not convert a layer. {left}.", stacklevel=2)
    return model


def _pack_all(model: torch.nn.Module, dtype: torch.dtype | None) -> dict[str, str | None]:
    """Pack the weights of all layers of a model; return why a layer was left, or None, by name."""
    check_model(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Stack)}
    reasons = {name: _pack(layer, dtype) for name, layer in layers.items()}
    if not all(reasons.values()):
        return reasons
    name, reason = next(iter(reasons.items()), ("", "it has no recurrent layer of rl.nn"))
    got = f"{name or type(model).__name__}, which cannot be packed: {reason}"
    rule = "a model with a layer that the cpu kernels run, and whose weights persist between calls"
    fix = "call rl.accelerate(model) first for torch's own layers, or leave this model unpacked"
    if dtype is not None:
        got = f"{name or type(model).__name__}, which cannot be quantised: {reason}"
        rule = f"{rule}: an RNN, LSTM or GRU in float32"
        fix = (
            "call rl.accelerate(model) first for torch's own layers, or leave this model in float32"
        )
    raise DispatchError("model", got, rule, fix)


def _pack(layer: Stack, dtype: torch.dtype | None) -> str | None:
    """Pack the weights of one layer, or return the reason why they cannot be packed."""
    weights = layer._weights()
    like = layer._like(weights)
    if not isinstance(like, Tensor):
        return "its cell has no weights that the kernels support"
    traits = Traits(layer.cell, layer.input_size, layer.hidden_size, like.dtype, like.device, False)
    try:
        backend, _ = pick(traits, layer.schedule, layer.backend)
    except DispatchError as refused:
        return str(refused)
    if backend != "cpu":
        return f"the backend {backend} runs it"
    if isinstance(layer.cell, ModuleCell):
        if dtype is not None:
            return f"a {type(layer).__name__} has no kernels for int8 weights; only RNN, LSTM and GRU have"
        pack_products(layer)
        return None
    tensors = _tensors(weights)
    again = _tensors(layer._weights())
    if any(first is not second for first, second in zip(tensors, again, strict=True)):
        return "its weights are computed in each call"
    if any(tensor.is_inference() for tensor in tensors):
        return "its weights were created in torch.inference_mode(), so PyTorch does not record their changes"
    if dtype is not None and (reason := _reason_against_int8(layer, like)):
        return reason
    packed = [_packed(layer, weights, depth, dtype) for depth in range(layer.num_layers)]
    _watch_optimizers()
    parameters = layer._parameters if layer._weights_are_parameters else {}
    _packed_weights[layer] = PackedWeights(tensors, packed, parameters)
    plans.pop(layer, None)
    return None


def pack_products(module: torch.nn.Module) -> None:
    """Pack the weights of the linear layers in a module."""
    for inner in module.modules():
        if type(inner) is torch.nn.Linear and not inner.weight.is_inference():
            wide = torch.promote_types(inner.weight.dtype, torch.float32)
            product = prepared_product(inner.weight.detach().to(wide))
            _packed_weights[inner] = PackedWeights([inner.weight], [product])
    _watch_optimizers()


def packed_product(linear: torch.nn.Linear) -> PreparedProgram | None:
    """Return the packed weight of a linear layer, while it is valid."""
    stored = _packed_weights.get(linear)
    ready = stored.packed_for(((linear.weight,),)) if stored is not None else ()
    return ready[0] if ready else None


def has_packed_products(module: torch.nn.Module) -> bool:
    """Return True if a linear layer in a module has a packed weight."""
    linears = [inner for inner in module.modules() if type(inner) is torch.nn.Linear]
    return any(packed_product(linear) is not None for linear in linears)


def _reason_against_int8(layer: Stack, like: Tensor) -> str | None:
    """Return why a layer's weights cannot be int8, or None if they can."""
    if cell_facts()[layer.cell.name].is_elementwise:
        return f"its cell {layer.cell.name} has no kernels for int8 weights; only RNN, LSTM and GRU have"
    if like.dtype is not torch.float32:
        return f"its weights are {like.dtype}; only torch.float32 can be converted to int8"
    joined = layer.state_sizes[0] * (2 if layer.bidirectional and layer.num_layers > 1 else 1)
    widest = max(layer.input_size, joined, *layer.state_sizes)
    if widest > _LONGEST_INT8_ROW:
        return f"its largest size is {widest}; rows of int8 weights have at most {_LONGEST_INT8_ROW} numbers"
    return None


def _tensors(weights: tuple[Any, ...]) -> list[Tensor]:
    return [tensor for tensor in chain(*weights) if tensor is not None]


def _packed(
    layer: Stack, weights: tuple[Any, ...], depth: int, dtype: torch.dtype | None
) -> Tensor:
    """Return the packed weights of one layer of a stack."""
    directions = 2 if layer.bidirectional else 1
    tensors = tuple(chain(*weights[depth * directions :][:directions]))
    width = layer.input_size if depth == 0 else directions * layer.state_sizes[0]
    offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
    operands = (tensors[0].new_empty(0, width), *tensors)
    kind = layer_of(
        layer.cell.name, offsets, operands, len(tensors), layer.state_sizes, directions, depth
    )
    return kind.packed(tensors, depth, dtype)


# ---- packed weights and their validity -----------------------------------------------------------


_version = attrgetter("_version")


def _facts_of(weights: Sequence[Tensor]) -> list[Any]:
    """Return what changes if the numbers of weights do; ``map`` reads them in C.

    Strides and the negative bit are among them because they change the values that are read from
    the same memory.
    """
    return [
        *map(_version, weights),
        *map(Tensor.data_ptr, weights),
        *map(Tensor.stride, weights),
        *map(Tensor.is_neg, weights),
    ]


class _Stored(NamedTuple):
    weights: tuple[Tensor, ...]  # the original ones
    places: list[int]  # the id of each
    facts: list[Any]
    parameters: list[int]  # the id of each parameter of the layer; [] if a weight is none
    packed: tuple[Any, ...]
    # They keep the memory allocated, so no other tensor can get its address.
    aliases: tuple[Tensor, ...]


class PackedWeights:
    """The packed weights of a layer, valid until one of the original tensors changes."""

    __slots__ = ("_stored", "is_int8")

    def __init__(
        self,
        weights: Sequence[Tensor],
        packed: Sequence[Any],
        parameters: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.is_int8 = packed[0].dtype is torch.int8
        own = [*map(id, parameters.values())]
        self._stored: _Stored | None = _Stored(
            tuple(weights),
            [*map(id, weights)],
            _facts_of(weights),
            own if set(own).issuperset(map(id, weights)) else [],
            tuple(packed),
            tuple([weight.detach() for weight in weights]),
        )

    def packed_for(self, weights: Sequence[Any]) -> tuple[Any, ...]:
        """Return the packed form of these weights, () for others; discard it if one has changed."""
        # Read once, because another thread may discard them.
        stored = self._stored
        if stored is None:
            return ()
        existing = [weight for weight in chain(*weights) if weight is not None]
        # Others replace them for one call, e.g. those of torch.func.functional_call.
        if [*map(id, existing)] != stored.places:
            return ()
        if _facts_of(existing) != stored.facts:
            self._stored = None
            return ()
        return stored.packed

    def packed_of(self, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
        """Do the same for a layer whose weights are its parameters; () also if they are not."""
        stored = self._stored
        if stored is None or [*map(id, parameters.values())] != stored.parameters:
            return ()
        return stored.packed if _facts_of(stored.weights) == stored.facts else ()

    def discard_if_any(self, weights: AbstractSet[int]) -> None:
        """Discard the packed weights if the set has the id of one of the originals."""
        stored = self._stored
        if stored is not None and not weights.isdisjoint(stored.places):
            self._stored = None


# Not an attribute of the layers, so that copies and pickles have no packed weights.
_packed_weights: WeakKeyDictionary[torch.nn.Module, PackedWeights] = WeakKeyDictionary()


def packed_weights(layer: torch.nn.Module) -> PackedWeights | None:
    """Return the packed weights of a layer, or None if they were never packed."""
    return _packed_weights.get(layer)


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Discard packed weights that a fused optimizer has changed, which versions do not show."""
    if any(group.get("fused") for group in optimizer.param_groups):
        weights = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        for packed in list(_packed_weights.values()):
            packed.discard_if_any(weights)
