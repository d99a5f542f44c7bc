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
    # For each leaf, the place of the first Ragged with the same lengths, and for a tensor its own
    # place.
    groups: tuple[int, ...]
    output_names: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, example: Any, layout: str) -> Signature:
        """Read an example; raises ArgumentError or ArgumentTypeError if it is invalid."""
        check_choice("layout", layout, ("padded", "flat"))
        arguments = example if type(example) is tuple else (example,)
        leaves = pytree.tree_leaves(list(arguments), is_leaf=_is_ragged)
        batches = [part for part in leaves if isinstance(part, Ragged)]
        rule = "a Ragged, or a tuple of Ragged and tensors, at least one of them a Ragged"
        if not batches or not all(
            part is None or isinstance(part, Tensor | Ragged) for part in leaves
        ):
            got = (
                type(example).__name__
                if type(example) is not tuple
                else ", ".join(type(p).__name__ for p in leaves)
            )
            raise ArgumentTypeError(
                "example", f"a {got}", rule, "wrap the sequences with rl.Ragged(sequences)"
            )
        if any(len(part) != len(batches[0]) for part in batches):
            got = " and ".join(str(len(part)) for part in batches)
            raise ArgumentError(
                "example", f"{got} sequences", "the same number in each batch", "pass one batch"
            )
        if sum(part.values.shape[0] for part in batches) == 0:
            raise ArgumentError(
                "example", "no element", "at least one element", "pass another batch"
            )
        parameters = list(inspect.signature(model.forward).parameters)
        names = tuple(parameters[: len(arguments)])
        if len(names) < len(arguments):
            rule = f"at most the {len(parameters)} parameters of the model's forward"
            fix = "wrap the model in a module whose forward has a parameter for each"
            raise ArgumentError("example", f"{len(arguments)} arguments", rule, fix)
        leaves = [part for part in leaves if part is not None]
        groups = tuple(
            next(place for place, other in enumerate(leaves) if _are_alike(part, other))
            for part in leaves
        )
        signature = cls(names, arguments, layout, groups)
        for name, part in signature.leaves():
            if isinstance(part, Tensor) and sum(size == len(batches[0]) for size in part.shape) > 1:
                rule = "a tensor with at most one dimension as long as the batch"
                fix = "pass an example with another number of sequences"
                raise ArgumentError("example", f"{name} of shape {tuple(part.shape)}", rule, fix)
        return signature

    def leaves(self) -> Iterator[tuple[str, Ragged | Tensor]]:
        """Return the Ragged and tensors of the arguments, with their names."""
        for name, argument in zip(self.names, self.example, strict=True):
            parts = pytree.tree_leaves(argument, is_leaf=_is_ragged)
            for index, part in enumerate(parts):
                if part is not None:
                    yield (name if len(parts) == 1 else f"{name}_{index}"), part

    def rebuilt(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments with other Ragged and tensors."""
        found = iter(leaves)
        old, spec = pytree.tree_flatten(list(self.example), is_leaf=_is_ragged)
        return tuple(
            pytree.tree_unflatten([None if part is None else next(found) for part in old], spec)
        )

    @property
    def inputs(self) -> dict[str, dict[int, str]]:
        """The names of the exported model's inputs, and of their dynamic dimensions."""
        leaves = list(self.leaves())
        is_padded = self.layout == "padded"
        batches = {
            place: group
            for place, group in enumerate(self.groups)
            if isinstance(leaves[place][1], Ragged)
        }
        # Otherwise ambiguous names begin with that of the argument.
        tensors = {name for name, part in leaves if isinstance(part, Tensor)}
        is_free = tensors.isdisjoint(("values", "lengths", "offsets"))
        found: dict[str, dict[int, str]] = {}
        for place, (name, part) in enumerate(leaves):
            if isinstance(part, Tensor):
                found[name] = {
                    axis: "sequences" for axis, size in enumerate(part.shape) if size == self.count
                }
                continue
            own = (
                ""
                if is_free and len(set(batches.values())) == 1
                else f"{leaves[batches[place]][0]}_"
            )
            values = "values" if is_free and len(batches) == 1 else f"{name}_values"
            found[values] = (
                {0: "sequences", 1: f"{own}steps"} if is_padded else {0: f"{own}elements"}
            )
            if place == batches[place]:
                found[f"{own}lengths" if is_padded else f"{own}offsets"] = {
                    0: "sequences" if is_padded else _OFFSETS
                }
        return found

    def dims(self) -> tuple[dict[int, Any], ...]:
        """Return the dynamic dimensions for ``torch.export``; those of one name share their
        size.
        """
        sequences = torch.export.Dim("sequences")
        sizes = {"sequences": sequences, _OFFSETS: sequences + 1}
        named = {name for names in self.inputs.values() for name in names.values()}
        sizes |= {name: torch.export.Dim(name) for name in named - sizes.keys()}
        return tuple(
            {place: sizes[name] for place, name in names.items()} for names in self.inputs.values()
        )

    @property
    def count(self) -> int:
        """The number of sequences of the example."""
        return next(len(part) for _, part in self.leaves() if isinstance(part, Ragged))

    def fresh(self, lengths: list[int], generator: torch.Generator) -> list[Ragged | Tensor]:
        """Return leaves of other lengths, whose elements and rows are drawn from the example."""
        count = self.count
        made: list[Ragged | Tensor] = []
        for (_, part), group in zip(self.leaves(), self.groups, strict=True):
            if isinstance(part, Ragged):
                # Batches of another group have other lengths, as in the example.
                turned = [*lengths[group % len(lengths) :], *lengths[: group % len(lengths)]]
                wanted = torch.tensor(
                    [length + group * (length > 0) for length in turned], device="cpu"
                )
                rows = torch.randint(
                    part.values.shape[0], (int(wanted.sum()),), generator=generator
                )
                made.append(
                    Ragged.from_flat(part.values.detach()[rows.to(part.device)], lengths=wanted)
                )
                continue
            tensor = part.detach()
            for place, size in enumerate(part.shape):
                if size == count:
                    rows = torch.randint(count, (len(lengths),), generator=generator)
                    tensor = tensor.index_select(place, rows.to(part.device))
            made.append(tensor)
        return made

    def tensors(self, leaves: Sequence[Ragged | Tensor]) -> list[Tensor]:
        """Return the inputs of the exported model for some leaves."""
        found: list[Tensor] = []
        for place, (part, group) in enumerate(zip(leaves, self.groups, strict=True)):
            if isinstance(part, Tensor):
                found.append(part)
                continue
            pair = (part.values, part.offsets) if self.layout == "flat" else part.to_padded()
            found += pair if place == group else pair[:1]
        return found


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
        given = iter(tensors)
        leaves: list[Ragged | Tensor] = []
        starts: list[tuple[Tensor, Tensor]] = []
        held: dict[
            int, tuple[Tensor, Tensor | None]
        ] = {}  # offsets, and with padding the index of the elements
        for place, ((_, part), group) in enumerate(
            zip(self._signature.leaves(), self._signature.groups, strict=True)
        ):
            values = next(given)
            if isinstance(part, Tensor):
                leaves.append(values)
                continue
            if place == group:
                is_padded = self._signature.layout == "padded"
                second = next(given)
                held[group] = (
                    places_in_padded(values, second)
                    if is_padded
                    else (offsets_within(second, values.shape[0]), None)
                )
            offsets, index = held[group]
            elements = values if index is None else values.flatten(0, 1).index_select(0, index)
            leaves.append(Ragged._make(elements, offsets, None))
            starts.append((offsets, values))
        found = list(self._named(self.model(*self._signature.rebuilt(leaves)), starts))
        # Not an attribute of this module, because torch.export restores those.
        self._signature.output_names[:] = [name for name, _ in found]
        # A copy, because an exporter would give a tensor that is an input, or is returned twice, a
        # single name.
        parts: list[Tensor] = list(tensors)
        for _, part in found:
            parts.append(part.clone() if any(part is one for one in parts) else part)
        return parts[len(tensors) :]

    def _named(
        self, output: Any, starts: list[tuple[Tensor, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the model's output with their names."""
        paths, _ = pytree.tree_flatten_with_path(output, is_leaf=_is_ragged)
        for path, part in paths:
            name = "_".join(["output", *[_key(key) for key in path]])
            if isinstance(part, Tensor):
                yield name, part
            elif isinstance(part, Ragged):
                yield from self._of_ragged(name, part, starts)

    def _of_ragged(
        self, name: str, batch: Ragged, starts: list[tuple[Tensor, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield a Ragged as tensors; only its values if it has the lengths of an input."""
        given = next((values for offsets, values in starts if offsets is batch.offsets), None)
        if self._signature.layout == "flat":
            yield name, batch.values
            if given is None:
                yield f"{name}_offsets", batch.offsets
            return
        steps = F.pad(batch.lengths, (0, 1)).max().item() if given is None else given.shape[1]
        yield name, padded_of_elements(batch.values, batch.offsets, steps)
        if given is None:
            yield f"{name}_lengths", batch.lengths


def _is_ragged(part: Any) -> bool:
    return isinstance(part, Ragged)


def _are_alike(one: Ragged | Tensor, other: Ragged | Tensor) -> bool:
    """Return True for batches with the same lengths."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return torch.equal(one.host_lengths, other.host_lengths)


def _key(key: Any) -> str:
    names = (getattr(key, name) for name in ("idx", "key", "name") if hasattr(key, name))
    return str(next(names, key))


# -- Ragged to tensors and back, with operators that can be exported
# --------------------------------------------------


def places_in_padded(padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the offsets of the elements of a padded tensor ``(B, T, *features)``, and their index
    in its rows.

    Lengths are clamped.
    """
    lengths = lengths.to(torch.int64).clamp(0, padded.shape[1])
    is_real = torch.arange(padded.shape[1], device=padded.device) < lengths.unsqueeze(1)
    # Not a pad, which in code of Inductor reads beyond an empty tensor.
    return torch.cat(
        [lengths.new_zeros(1), lengths.cumsum(0)]
    ), is_real.flatten().nonzero().squeeze(1)


def elements_of_padded(padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements of a padded tensor ``(B, T, *features)`` and their offsets; lengths are
    clamped.
    """
    offsets, index = places_in_padded(padded, lengths)
    return padded.flatten(0, 1).index_select(0, index), offsets


def offsets_within(offsets: Tensor, total: Any) -> Tensor:
    """Return valid offsets of ``total`` elements.

    Valid offsets do not change. Of others the first becomes 0, the last ``total``, and those
    between are clamped. A sequence that would end before it starts becomes empty, and later ones
    keep their lengths while elements are left.
    """
    place = torch.arange(offsets.shape[0], device=offsets.device)
    held = torch.where(place + 1 < offsets.shape[0], offsets.to(torch.int64).clamp(0, total), total)
    held = torch.where(place > 0, held, 0)
    # ONNX has no cumulative maximum. No tensor is empty, because Inductor's code reads beyond one
    # that is padded.
    return (
        (held - held.index_select(0, (place - 1).clamp(min=0)))
        .clamp(min=0)
        .cumsum(0)
        .clamp(max=total)
    )


def padded_of_elements(values: Tensor, offsets: Tensor, steps: Any) -> Tensor:
    """Return ``(B, steps, *features)``, padded with zeros."""
    step = torch.arange(steps, device=values.device)
    is_real = step < offsets.diff().unsqueeze(1)
    element = torch.where(is_real, step + offsets[:-1].unsqueeze(1), values.shape[0])
    return torch.cat([values, values.new_zeros(1, *values.shape[1:])])[element]
