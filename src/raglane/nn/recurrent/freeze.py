"""Keep a model's recurrent weights in the form in which the kernels read them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from raglane._utils.checks import check_model
from raglane._utils.messages import message, quote
from raglane.errors import ArgumentError, DispatchError
from raglane.kernels.contract import Traits
from raglane.kernels.cpu.layer import layer_of
from raglane.kernels.dispatch import pick
from raglane.native.library import cell_facts
from raglane.nn.recurrent.stack import Stack, plans

M = TypeVar("M", bound=torch.nn.Module)

# So many products of int8 have a sum of 32 bits; csrc/abi/raglane.h has the same.
_MOST_OF_INT8 = 65536


def freeze(model: M, *, dtype: torch.dtype | None = None) -> M:
    """Pack the weights of a model's recurrent layers once, for inference, in place of once per call.

    The cpu kernels read weights in an order of their own, and bring them into it at the beginning of each call. That
    is most of the time of a call with few elements: of :meth:`~raglane.nn.recurrent.layer.RecurrentLayer.step`, and of
    a short batch on a wide layer. A frozen layer gives the same bits, in the memory of a second copy of its weights.

    What was packed is used in calls that record no gradients (within ``torch.no_grad()`` or
    ``torch.inference_mode()``, or where no weight requires one) and outside of autocast and ``torch.compile``. It ends
    where a weight is seen to have changed: by an optimizer, ``load_state_dict``, an operation in place, ``.data = ...``
    or ``.to(...)``; the layer then runs as it did before. A write past PyTorch's records is NOT seen: into
    ``weight.data`` in place, through a NumPy array or another process that shares
    the memory. After one of these, and to begin again, call this function again. Copies and pickles are not frozen.
    :func:`raglane.explain` says whether a layer is.

    With ``dtype=torch.int8`` what is packed of RNN, LSTM and GRU is int8, in a quarter of the memory, and a wide layer
    runs two to three times as fast where the processor has an instruction for it (VNNI). Numbers are rounded to 255
    levels: those of each row of a weight matrix by a scale of their own, and so, whenever they are read, each element's
    input and each state. The bits of a sequence still do not depend on its batch or the number of threads, but they are
    not those of float32. An input or a state that holds an infinity or NaN gives NaN. Biases, states, outputs,
    ``state_dict``, the weights themselves and all other modules stay what they are. In training mode, and in calls that
    do not use what was packed (see above), the float32 weights run.

    Args:
        model: any module; it may be a recurrent layer of ``rl.nn`` itself. Layers that the cpu kernels do not run, or
            whose weights are computed anew in each call (parametrizations), stay as they are.
        dtype: ``torch.int8``, for layers with float32 weights; a warning names those that stay as they are. None keeps
            the weights' own.

    Returns:
        The model that was given.

    Raises:
        ArgumentTypeError: not a module.
        ArgumentError: another ``dtype``; or int8 for a model in training mode.
        DispatchError: no layer of the model can be frozen; the message says why.

    Example:
        >>> import raglane as rl
        >>> layer = rl.freeze(rl.nn.LSTM(3, 4).eval())
        >>> with torch.inference_mode():
        ...     out, state = layer.step(torch.randn(3))
        >>> out.shape
        torch.Size([4])
        >>> layer = rl.freeze(rl.nn.LSTM(3, 4).eval(), dtype=torch.int8)
        >>> print(rl.explain(layer, rl.Ragged([torch.randn(2, 3)])).reason.split("; ")[1])
        frozen: its weights are int8 in calls that record no gradients
    """
    check_model(model)
    if dtype is not None and dtype is not torch.int8:
        rule = "torch.int8, or None for the dtype of the weights"
        raise ArgumentError(message("dtype", quote(dtype), rule, "pass torch.int8, or leave it out"))
    layers = {name: part for name, part in model.named_modules() if isinstance(part, Stack)}
    if dtype is not None and any(layer.training for layer in layers.values()):
        rule, fix = "in evaluation mode, since int8 weights are for inference", "call model.eval() first"
        raise ArgumentError(message("model", "a model in training mode", rule, fix))
    reasons = {name: _freeze(layer, dtype) for name, layer in layers.items()}
    if all(reasons.values()):
        name, reason = next(iter(reasons.items()), ("", "it has no recurrent layer of rl.nn"))
        got = f"{name or type(model).__name__}, whose layers cannot be frozen: {reason}"
        rule = "one layer at least that the cpu kernels run, with weights that stay from call to call"
        fix = "call rl.accelerate(model) first for torch's own layers, or use the model without rl.freeze"
        if dtype is not None:
            rule = f"{rule}, as an RNN, LSTM or GRU in float32"
        raise DispatchError(message("model", got, rule, fix))
    left = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
    if left and dtype is not None:
        warnings.warn(f"rl.freeze has left a layer as it is. {left}.", stacklevel=2)
    return model


def _freeze(layer: Stack, dtype: torch.dtype | None) -> str | None:
    """Freeze one layer, or say why it cannot be."""
    weights = layer._weights()
    like = layer._like(weights)
    if not isinstance(like, Tensor):
        return "its cell has no weights that the kernels know"
    traits = Traits(layer.cell, layer.input_size, layer.hidden_size, like.dtype, like.device, False)
    try:
        backend, _ = pick(traits, layer.schedule, layer.backend)
    except DispatchError as refused:
        return str(refused)
    if backend != "cpu":
        return f"the backend {backend} runs it"
    parts = _parts(weights)
    if any(part is not again for part, again in zip(parts, _parts(layer._weights()), strict=True)):
        return "its weights are computed anew in each call"
    if any(part.is_inference() for part in parts):
        return "its weights were made in torch.inference_mode(), where PyTorch does not record their changes"
    if dtype is not None and (reason := _why_not_int8(layer, like)):
        return reason
    packed = [_packed(layer, weights, depth, dtype) for depth in range(layer.num_layers)]
    _hear_of_steps()
    _kept[layer] = Kept(parts, packed)
    plans.pop(layer, None)
    return None


def _why_not_int8(layer: Stack, like: Tensor) -> str | None:
    """Why a layer's weights cannot be int8, or None if they can."""
    if cell_facts()[layer.cell.name].is_elementwise:
        return f"the kernels of its cell, {layer.cell.name}, have no int8 weights; those of RNN, LSTM and GRU have"
    if like.dtype is not torch.float32:
        return f"its weights are {like.dtype}; int8 ones are made of torch.float32"
    joined = layer.state_sizes[0] * (2 if layer.bidirectional and layer.num_layers > 1 else 1)
    widest = max(layer.input_size, joined, *layer.state_sizes)
    if widest > _MOST_OF_INT8:
        return f"its sizes reach {widest}; rows of int8 weights have at most {_MOST_OF_INT8} numbers"
    return None


def _parts(weights: tuple[Any, ...]) -> list[Tensor]:
    return [part for own in weights for part in own if part is not None]


def _packed(layer: Stack, weights: tuple[Any, ...], depth: int, dtype: torch.dtype | None) -> Tensor:
    """What the kernels read of one layer of a stack."""
    directions = 2 if layer.bidirectional else 1
    own = tuple(part for each in weights[depth * directions :][:directions] for part in each)
    width = layer.input_size if depth == 0 else directions * layer.state_sizes[0]
    offsets, tensors = torch.zeros(1, dtype=torch.int64, device="cpu"), (own[0].new_empty(0, width), *own)
    kind = layer_of(layer.cell.name, offsets, tensors, len(own), layer.state_sizes, directions, depth)
    return kind.packed(own, depth, dtype)


# ---- what was packed, while the weights are what they were ----------------------------------------------------------


class Kept:
    """The weights of all layers and directions as they were, and what :meth:`Layer.packed` made of each layer's."""

    __slots__ = ("_known", "_packed", "of_int8")

    def __init__(self, weights: Sequence[Tensor], packed: Sequence[Tensor]) -> None:
        self.of_int8 = packed[0].dtype is torch.int8
        # An alias of each holds its memory: no other numbers come to lie at the same address. The same memory may be
        # read in another order, or with the other sign.
        self._known = [
            (part, part._version, part.data_ptr(), part.stride(), part.is_neg(), part.detach()) for part in weights
        ]
        self._packed = tuple(packed)

    def packed_for(self, weights: Sequence[Any]) -> tuple[Tensor, ...]:
        """What was packed of exactly these weights, or nothing; a change of one of them ends it for good."""
        # Another thread may end it meanwhile.
        place, all_known, packed = 0, self._known, self._packed
        for own in weights:
            for part in own:
                if part is None:
                    continue
                if place == len(all_known):
                    return ()
                known, version, address, strides, is_neg, _ = all_known[place]
                if part is not known:
                    return ()  # for this call alone, as torch.func.functional_call does it
                if (
                    part._version != version
                    or part.data_ptr() != address
                    or part.stride() != strides
                    or part.is_neg() is not is_neg
                ):
                    self._end()
                    return ()
                place += 1
        return packed if place == len(all_known) else ()

    def changed(self, weights: AbstractSet[int]) -> None:
        """End it, if it was packed of any of these weights."""
        if any(id(known) in weights for known, *_ in self._known):
            self._end()

    def _end(self) -> None:
        self._packed, self._known = (), []


# Not on the layers themselves: a copy of a layer has weights of its own, and a pickle none of this.
_kept: WeakKeyDictionary[torch.nn.Module, Kept] = WeakKeyDictionary()


def kept_of(layer: torch.nn.Module) -> Kept | None:
    """What was packed of a layer's weights, if anything was."""
    return _kept.get(layer)


@cache
def _hear_of_steps() -> None:
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """PyTorch keeps no record of what a fused optimizer writes."""
    if any(group.get("fused") for group in optimizer.param_groups):
        weights = {id(part) for group in optimizer.param_groups for part in group["params"]}
        for kept in list(_kept.values()):
            kept.changed(weights)
