"""Keep a model's recurrent weights in the form in which the kernels read them."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from raglane.errors import DispatchError, message
from raglane.kernels.contract import Traits
from raglane.kernels.cpu.kind import layer_of
from raglane.kernels.dispatch import pick
from raglane.nn.arguments import check_model
from raglane.nn.recurrent.kept import Kept, keep
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.recurrent.request import forget_plan

__all__ = ["freeze"]

M = TypeVar("M", bound=torch.nn.Module)


def freeze(model: M) -> M:
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

    Args:
        model: any module; it may be a recurrent layer of ``rl.nn`` itself. Layers that the cpu kernels do not run, or
            whose weights are computed anew in each call (parametrizations), stay as they are.

    Returns:
        The model that was given.

    Raises:
        ArgumentTypeError: not a module.
        DispatchError: no layer of the model can be frozen; the message says why.

    Example:
        >>> import raglane as rl
        >>> layer = rl.freeze(rl.nn.LSTM(3, 4).eval())
        >>> with torch.inference_mode():
        ...     out, state = layer.step(torch.randn(3))
        >>> out.shape
        torch.Size([4])
    """
    check_model(model)
    layers = {name: part for name, part in model.named_modules() if isinstance(part, RecurrentLayer)}
    reasons = {name: _freeze(layer) for name, layer in layers.items()}
    if all(reasons.values()):
        name, reason = next(iter(reasons.items()), ("", "it has no recurrent layer of rl.nn"))
        got = f"{name or type(model).__name__}, of which no layer can be frozen: {reason}"
        rule = "one layer at least that the cpu kernels run, with weights that stay from call to call"
        fix = "call rl.accelerate(model) first for torch's own layers, or leave the model as it is"
        raise DispatchError(message("model", got, rule, fix))
    return model


def _freeze(layer: RecurrentLayer) -> str | None:
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
    keep(layer, Kept(parts, [_packed(layer, weights, depth) for depth in range(layer.num_layers)]))
    forget_plan(layer)
    return None


def _parts(weights: tuple[Any, ...]) -> list[Tensor]:
    return [part for own in weights for part in own if part is not None]


def _packed(layer: RecurrentLayer, weights: tuple[Any, ...], depth: int) -> Tensor:
    """What the kernels read of one layer of a stack."""
    directions = 2 if layer.bidirectional else 1
    own = tuple(part for each in weights[depth * directions :][:directions] for part in each)
    width = layer.input_size if depth == 0 else directions * layer.state_sizes[0]
    offsets, tensors = torch.zeros(1, dtype=torch.int64), (own[0].new_empty(0, width), *own)
    kind = layer_of(layer.cell.name, offsets, tensors, len(own), layer.state_sizes, directions, depth)
    return kind.packed(own, depth)
