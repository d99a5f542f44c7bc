"""The inputs and outputs of an exported model: names, shapes, and random batches for
verification.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from raglane._utils.checks import check_choice
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.ragged import Ragged

Layout = Literal["padded", "flat"]
_OFFSETS = "sequences + 1"  # the name of a dimension


@dataclass(frozen=True)
class Signature:
    """The arguments of a model, read from an example."""

    names: tuple[str, ...]
    example: tuple[Any, ...]
    layout: str  # see Layout
    # For each leaf, the index of the first Ragged with the same lengths, and for a tensor its own
    # index.
    groups: tuple[int, ...]
    output_names: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, example: Any, layout: str) -> Signature:
        """Read an example; raises ArgumentError or ArgumentTypeError if it is invalid."""
        check_choice("layout", layout, ("padded", "flat"))
        arguments = example if type(example) is tuple else (example,)
        leaves = pytree.tree_leaves(list(arguments), is_leaf=_is_ragged)
        count = _check_leaves(example, leaves)
        parameters = list(inspect.signature(model.forward).parameters)
        names = tuple(parameters[: len(arguments)])
        if len(names) < len(arguments):
            rule = f"at most the {len(parameters)} parameters of the model's forward"
            fix = "wrap the model in a module whose forward has a parameter for each"
            raise ArgumentError("example", f"{len(arguments)} arguments", rule, fix)
        leaves = [leaf for leaf in leaves if leaf is not None]
        groups = tuple(
            next(index for index, other in enumerate(leaves) if _are_alike(leaf, other))
            for leaf in leaves
        )
        signature = cls(names, arguments, layout, groups)
        for name, leaf in signature.leaves():
            if isinstance(leaf, Tensor) and list(leaf.shape).count(count) > 1:
                rule = "a tensor with at most one dimension as long as the batch"
                fix = "pass an example with another number of sequences"
                raise ArgumentError("example", f"{name} of shape {tuple(leaf.shape)}", rule, fix)
        return signature

    def leaves(self) -> Iterator[tuple[str, Ragged | Tensor]]:
        """Return the Ragged and tensors of the arguments, with their names."""
        for name, argument in zip(self.names, self.example, strict=True):
            values = pytree.tree_leaves(argument, is_leaf=_is_ragged)
            for index, leaf in enumerate(values):
                if leaf is not None:
                    yield (name if len(values) == 1 else f"{name}_{index}"), leaf

    def rebuilt(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments with other Ragged and tensors."""
        replacements = iter(leaves)
        old, spec = pytree.tree_flatten(list(self.example), is_leaf=_is_ragged)
        return tuple(
            pytree.tree_unflatten(
                [None if leaf is None else next(replacements) for leaf in old], spec
            )
        )

    @property
    def inputs(self) -> dict[str, dict[int, str]]:
        """The names of the exported model's inputs, and of their dynamic dimensions."""
        leaves = list(self.leaves())
        is_padded = self.layout == "padded"
        batches = [
            group
            for (_, leaf), group in zip(leaves, self.groups, strict=True)
            if isinstance(leaf, Ragged)
        ]
        # Otherwise ambiguous names begin with that of the argument.
        tensors = {name for name, leaf in leaves if isinstance(leaf, Tensor)}
        is_free = tensors.isdisjoint(("values", "lengths", "offsets"))
        inputs: dict[str, dict[int, str]] = {}
        for index, ((name, leaf), group) in enumerate(zip(leaves, self.groups, strict=True)):
            if not isinstance(leaf, Ragged):
                inputs[name] = self._batch_axes(leaf)
                continue
            prefix = "" if is_free and len(set(batches)) == 1 else f"{leaves[group][0]}_"
            values = "values" if is_free and len(batches) == 1 else f"{name}_values"
            if is_padded:
                inputs[values] = {0: "sequences", 1: f"{prefix}steps"}
            else:
                inputs[values] = {0: f"{prefix}elements"}
            if index == group and is_padded:
                inputs[f"{prefix}lengths"] = {0: "sequences"}
            elif index == group:
                inputs[f"{prefix}offsets"] = {0: _OFFSETS}
        return inputs

    def _batch_axes(self, tensor: Tensor) -> dict[int, str]:
        """Return the dimensions of a tensor that are as long as the batch."""
        return {axis: "sequences" for axis, size in enumerate(tensor.shape) if size == self.count}

    def dims(self) -> tuple[dict[int, Any], ...]:
        """Return the dynamic dimensions for ``torch.export``; those of one name share their
        size.
        """
        sequences = torch.export.Dim("sequences")
        sizes = {"sequences": sequences, _OFFSETS: sequences + 1}
        named = {name for names in self.inputs.values() for name in names.values()}
        sizes |= {name: torch.export.Dim(name) for name in named - sizes.keys()}
        return tuple(
            {axis: sizes[name] for axis, name in names.items()} for names in self.inputs.values()
        )

    @property
    def count(self) -> int:
        """The number of sequences of the example."""
        return next(len(leaf) for _, leaf in self.leaves() if isinstance(leaf, Ragged))

    def fresh(self, lengths: list[int], generator: torch.Generator) -> list[Ragged | Tensor]:
        """Return leaves of other lengths, whose elements and rows are drawn from the example."""
        fresh: list[Ragged | Tensor] = []
        for (_, leaf), group in zip(self.leaves(), self.groups, strict=True):
            if isinstance(leaf, Ragged):
                fresh.append(_fresh_batch(leaf, lengths, group, generator))
                continue
            tensor = leaf.detach()
            for axis in self._batch_axes(leaf):
                rows = torch.randint(self.count, (len(lengths),), generator=generator)
                tensor = tensor.index_select(axis, rows.to(leaf.device))
            fresh.append(tensor)
        return fresh

    def tensors(self, leaves: Sequence[Ragged | Tensor]) -> list[Tensor]:
        """Return the inputs of the exported model for some leaves."""
        tensors: list[Tensor] = []
        for index, (leaf, group) in enumerate(zip(leaves, self.groups, strict=True)):
            if not isinstance(leaf, Ragged):
                tensors.append(leaf)
                continue
            pair = (leaf.values, leaf.offsets) if self.layout == "flat" else leaf.to_padded()
            tensors += pair if index == group else pair[:1]
        return tensors


class Surface(nn.Module):
    """A model with only tensors as inputs and outputs, which is traced."""

    def __init__(self, model: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.model = model
        self._signature = signature

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Call the model; the tensors are values and offsets or lengths of each Ragged, and other
        tensors.
        """
        remaining = iter(tensors)
        leaves: list[Ragged | Tensor] = []
        starts: list[tuple[Tensor, Tensor]] = []
        # By group the offsets, and with padding the index of the elements.
        elements: dict[int, tuple[Tensor, Tensor | None]] = {}
        for number, ((_, leaf), group) in enumerate(
            zip(self._signature.leaves(), self._signature.groups, strict=True)
        ):
            values = next(remaining)
            if not isinstance(leaf, Ragged):
                leaves.append(values)
                continue
            if number == group:
                elements[group] = self._elements(values, next(remaining))
            offsets, index = elements[group]
            flat = values if index is None else values.flatten(0, 1).index_select(0, index)
            leaves.append(Ragged._make(flat, offsets, None))
            starts.append((offsets, values))
        outputs = list(self._named(self.model(*self._signature.rebuilt(leaves)), starts))
        # Not an attribute of this module, because torch.export restores those.
        self._signature.output_names[:] = [name for name, _ in outputs]
        # A copy, because an exporter would give a tensor that is an input, or is returned twice, a
        # single name.
        distinct: list[Tensor] = list(tensors)
        for _, output in outputs:
            is_repeated = any(output is earlier for earlier in distinct)
            distinct.append(output.clone() if is_repeated else output)
        return distinct[len(tensors) :]

    def _elements(self, values: Tensor, second: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the offsets of a Ragged, and with padding the index of its elements."""
        if self._signature.layout == "padded":
            return index_in_padded(values, second)
        return offsets_within(second, values.shape[0]), None

    def _named(
        self, output: Any, starts: list[tuple[Tensor, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the model's output with their names."""
        paths, _ = pytree.tree_flatten_with_path(output, is_leaf=_is_ragged)
        for path, value in paths:
            name = "_".join(["output", *[_key(key) for key in path]])
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, Ragged):
                yield from self._of_ragged(name, value, starts)

    def _of_ragged(
        self, name: str, batch: Ragged, starts: list[tuple[Tensor, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield a Ragged as tensors; only its values if it has the lengths of an input."""
        like = next((values for offsets, values in starts if offsets is batch.offsets), None)
        if self._signature.layout == "flat":
            yield name, batch.values
            if like is None:
                yield f"{name}_offsets", batch.offsets
            return
        steps = F.pad(batch.lengths, (0, 1)).max().item() if like is None else like.shape[1]
        yield name, padded_of_elements(batch.values, batch.offsets, steps)
        if like is None:
            yield f"{name}_lengths", batch.lengths


def _check_leaves(example: Any, leaves: list[Any]) -> int:
    """Return the number of sequences of an example; raises if the example is invalid."""
    batches = [leaf for leaf in leaves if isinstance(leaf, Ragged)]
    rule = "a Ragged, or a tuple of Ragged and tensors, at least one of them a Ragged"
    if not batches or not all(isinstance(leaf, Tensor | Ragged | None) for leaf in leaves):
        got = type(example).__name__
        if type(example) is tuple:
            got = ", ".join(type(leaf).__name__ for leaf in leaves)
        fix = "wrap the sequences with rl.Ragged(sequences)"
        raise ArgumentTypeError("example", f"a {got}", rule, fix)
    count = len(batches[0])
    if any(len(batch) != count for batch in batches):
        got = " and ".join(str(len(batch)) for batch in batches)
        rule = "the same number in each batch"
        raise ArgumentError("example", f"{got} sequences", rule, "pass one batch")
    if sum(batch.values.shape[0] for batch in batches) == 0:
        fix = "pass another batch"
        raise ArgumentError("example", "no element", "at least one element", fix)
    return count


def _fresh_batch(
    like: Ragged, lengths: list[int], group: int, generator: torch.Generator
) -> Ragged:
    """Return a batch of elements that are drawn from another one."""
    # Batches of another group have other lengths, as in the example.
    turn = group % len(lengths)
    turned = [*lengths[turn:], *lengths[:turn]]
    counts = torch.tensor([length + group * (length > 0) for length in turned], device="cpu")
    total = like.values.shape[0]
    rows = torch.randint(total, (int(counts.sum()),), generator=generator)
    return Ragged.from_flat(like.values.detach()[rows.to(like.device)], lengths=counts)


def _is_ragged(value: Any) -> bool:
    return isinstance(value, Ragged)


def _are_alike(first: Ragged | Tensor, second: Ragged | Tensor) -> bool:
    """Return True for batches with the same lengths."""
    if not (isinstance(first, Ragged) and isinstance(second, Ragged)):
        return first is second
    return torch.equal(first.lengths_cpu, second.lengths_cpu)


def _key(key: Any) -> str:
    names = (getattr(key, name) for name in ("idx", "key", "name") if hasattr(key, name))
    return str(next(names, key))


# -- Ragged to tensors and back, with operators that can be exported
# --------------------------------------------------


def index_in_padded(padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the offsets of the elements of a padded tensor ``(B, T, *features)``, and their index
    in its rows.

    Lengths are clamped.
    """
    lengths = lengths.to(torch.int64).clamp(0, padded.shape[1])
    is_real = torch.arange(padded.shape[1], device=padded.device) < lengths.unsqueeze(1)
    # Not a pad, which in code of Inductor reads beyond an empty tensor.
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return offsets, is_real.flatten().nonzero().squeeze(1)


def elements_of_padded(padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements of a padded tensor ``(B, T, *features)`` and their offsets; lengths are
    clamped.
    """
    offsets, index = index_in_padded(padded, lengths)
    return padded.flatten(0, 1).index_select(0, index), offsets


def offsets_within(offsets: Tensor, total: Any) -> Tensor:
    """Return valid offsets of ``total`` elements.

    Valid offsets do not change. Of others the first becomes 0, the last ``total``, and those
    between are clamped. A sequence that would end before it starts becomes empty, and later ones
    keep their lengths while elements are left.
    """
    index = torch.arange(offsets.shape[0], device=offsets.device)
    is_start = index + 1 < offsets.shape[0]
    clamped = torch.where(is_start, offsets.to(torch.int64).clamp(0, total), total)
    clamped = torch.where(index > 0, clamped, 0)
    # ONNX has no cumulative maximum. No tensor is empty, because Inductor's code reads beyond one
    # that is padded.
    before = clamped.index_select(0, (index - 1).clamp(min=0))
    return (clamped - before).clamp(min=0).cumsum(0).clamp(max=total)


def padded_of_elements(values: Tensor, offsets: Tensor, steps: Any) -> Tensor:
    """Return ``(B, steps, *features)``, padded with zeros."""
    step = torch.arange(steps, device=values.device)
    is_real = step < offsets.diff().unsqueeze(1)
    element = torch.where(is_real, step + offsets[:-1].unsqueeze(1), values.shape[0])
    return torch.cat([values, values.new_zeros(1, *values.shape[1:])])[element]
