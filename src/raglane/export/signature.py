"""The inputs and outputs of an exported model: names, shapes, and random batches for verification."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.ragged import Ragged

Layout = Literal["padded", "flat"]
_LAYOUTS = ("padded", "flat")


@dataclass(frozen=True)
class Signature:
    """The arguments of a model, read from an example."""

    names: tuple[str, ...]
    example: tuple[Any, ...]
    layout: Layout
    output_names: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, example: Any, layout: str) -> Signature:
        """Read an example; raises ArgumentError or ArgumentTypeError if it is invalid."""
        if layout not in _LAYOUTS:
            raise ArgumentError("layout", repr(layout), "'padded' or 'flat'", "choose one of them")
        arguments = example if type(example) is tuple else (example,)
        leaves = pytree.tree_leaves(list(arguments), is_leaf=lambda part: isinstance(part, Ragged))
        batches = [part for part in leaves if isinstance(part, Ragged)]
        rule = "a Ragged, or a tuple of Ragged and tensors, at least one of them a Ragged"
        if not batches or not all(part is None or isinstance(part, Tensor | Ragged) for part in leaves):
            got = type(example).__name__ if type(example) is not tuple else ", ".join(type(p).__name__ for p in leaves)
            fix = "wrap the sequences with rl.Ragged(sequences)"
            raise ArgumentTypeError("example", f"a {got}", rule, fix)
        if any(len(part) != len(batches[0]) for part in batches):
            got = " and ".join(str(len(part)) for part in batches)
            raise ArgumentError("example", f"{got} sequences", "the same number in each batch", "pass one batch")
        if sum(part.values.shape[0] for part in batches) == 0:
            raise ArgumentError("example", "no element", "at least one element", "pass another batch")
        parameters = list(inspect.signature(model.forward).parameters)
        names = tuple(parameters[: len(arguments)])
        if len(names) < len(arguments):
            rule = f"at most the {len(parameters)} parameters of the model's forward"
            fix = "wrap the model in a module whose forward has a parameter for each"
            raise ArgumentError("example", f"{len(arguments)} arguments", rule, fix)
        signature = cls(names, arguments, layout)  # type: ignore[arg-type]
        for name, part in signature.leaves():
            if isinstance(part, Tensor) and sum(size == len(batches[0]) for size in part.shape) > 1:
                got = f"{name} of shape {tuple(part.shape)}"
                rule = "a tensor with at most one dimension as long as the batch"
                fix = "pass an example with another number of sequences"
                raise ArgumentError("example", got, rule, fix)
        return signature

    def leaves(self) -> Iterator[tuple[str, Ragged | Tensor]]:
        """Return the Ragged and tensors of the arguments, with their names."""
        for name, argument in zip(self.names, self.example, strict=True):
            parts = pytree.tree_leaves(argument, is_leaf=lambda part: isinstance(part, Ragged))
            for index, part in enumerate(parts):
                if part is not None:
                    yield (name if len(parts) == 1 else f"{name}_{index}"), part

    def rebuilt(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments with other Ragged and tensors."""
        found = iter(leaves)
        _, spec = pytree.tree_flatten(list(self.example), is_leaf=lambda part: isinstance(part, Ragged))
        old = pytree.tree_leaves(list(self.example), is_leaf=lambda part: isinstance(part, Ragged))
        return tuple(pytree.tree_unflatten([None if part is None else next(found) for part in old], spec))

    @property
    def input_names(self) -> list[str]:
        """The names of the exported model's inputs."""
        one = sum(isinstance(part, Ragged) for _, part in self.leaves()) == 1
        second = "lengths" if self.layout == "padded" else "offsets"
        names: list[str] = []
        for name, part in self.leaves():
            if isinstance(part, Ragged):
                names += ["values", second] if one else [f"{name}_values", f"{name}_{second}"]
            else:
                names.append(name)
        return names

    @property
    def dimensions(self) -> list[dict[int, str]]:
        """The names of the dynamic dimensions of each input."""
        found: list[dict[int, str]] = []
        count = self.count
        for _, part in self.leaves():
            if isinstance(part, Tensor):
                found.append({place: "sequences" for place, size in enumerate(part.shape) if size == count})
            elif self.layout == "padded":
                found += [{0: "sequences", 1: "steps"}, {0: "sequences"}]
            else:
                found += [{0: "elements"}, {0: "sequences + 1"}]
        return found

    def dims(self) -> tuple[dict[int, Any], ...]:
        """Return the dynamic dimensions for ``torch.export``; those of the batch share their size."""
        sequences = torch.export.Dim("sequences")
        found: list[dict[int, Any]] = []
        for number, names in enumerate(self.dimensions):
            kinds = {"sequences": sequences, "sequences + 1": sequences + 1}
            found.append(
                {place: kinds.get(name) or torch.export.Dim(f"{name}_{number}") for place, name in names.items()}
            )
        return tuple(found)

    @property
    def count(self) -> int:
        """The number of sequences of the example."""
        return next(len(part) for _, part in self.leaves() if isinstance(part, Ragged))

    def fresh(self, lengths: list[int], generator: torch.Generator) -> list[Ragged | Tensor]:
        """Return leaves of other lengths, whose elements and rows are drawn from the example."""
        wanted, count = torch.tensor(lengths, device="cpu"), self.count
        made: list[Ragged | Tensor] = []
        for _, part in self.leaves():
            if isinstance(part, Ragged):
                rows = torch.randint(part.values.shape[0], (sum(lengths),), generator=generator)
                made.append(Ragged.from_flat(part.values.detach()[rows.to(part.device)], lengths=wanted))
                continue
            tensor = part.detach()
            for place, size in enumerate(part.shape):
                if size == count:
                    rows = torch.randint(count, (len(lengths),), generator=generator)
                    tensor = tensor.index_select(place, rows.to(part.device))
            made.append(tensor)
        return made

    def inputs(self, leaves: Sequence[Ragged | Tensor]) -> list[Tensor]:
        """Return the inputs of the exported model for some leaves."""
        found: list[Tensor] = []
        for part in leaves:
            if isinstance(part, Tensor):
                found.append(part)
            elif self.layout == "flat":
                found += [part.values, part.offsets]
            else:
                found += part.to_padded()
        return found


class Surface(nn.Module):
    """A model with only tensors as inputs and outputs, which is traced."""

    def __init__(self, model: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.model = model
        self._signature = signature

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Call the model; the tensors are values and offsets or lengths of each Ragged, and other tensors."""
        given = iter(tensors)
        leaves: list[Ragged | Tensor] = []
        starts: list[tuple[Tensor, Tensor]] = []
        for _, part in self._signature.leaves():
            values = next(given)
            if isinstance(part, Ragged):
                second = next(given)
                if self._signature.layout == "padded":
                    held = elements_of_padded(values, second)
                else:
                    held = values, offsets_within(second, values.shape[0])
                batch = Ragged._make(*held, None)
                leaves.append(batch)
                starts.append((batch.offsets, values))
            else:
                leaves.append(values)
        found = list(self._named(self.model(*self._signature.rebuilt(leaves)), starts))
        # Not an attribute of this module, because torch.export restores those.
        self._signature.output_names[:] = [name for name, _ in found]
        return [tensor for _, tensor in found]

    def _named(self, output: Any, starts: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the model's output with their names."""
        paths, _ = pytree.tree_flatten_with_path(output, is_leaf=lambda part: isinstance(part, Ragged))
        for path, part in paths:
            name = "_".join(["output", *[_key(key) for key in path]])
            if isinstance(part, Tensor):
                yield name, part
            elif isinstance(part, Ragged):
                yield from self._of_ragged(name, part, starts)

    def _of_ragged(self, name: str, batch: Ragged, starts: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[str, Tensor]]:
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


def _key(key: Any) -> str:
    for name in ("idx", "key", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


# -- Ragged to tensors and back, with operators that can be exported --------------------------------------------------


def elements_of_padded(padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements of a padded tensor ``(B, T, *features)`` and their offsets; lengths are clamped."""
    lengths = lengths.to(torch.int64).clamp(0, padded.shape[1])
    is_real = torch.arange(padded.shape[1], device=padded.device) < lengths.unsqueeze(1)
    index = is_real.flatten().nonzero().squeeze(1)
    # Not a pad, which in code of Inductor reads beyond an empty tensor.
    return padded.flatten(0, 1).index_select(0, index), torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def offsets_within(offsets: Tensor, total: Any) -> Tensor:
    """Return valid offsets of ``total`` elements.

    Valid offsets do not change. Of others the first becomes 0, the last ``total``, and those between are clamped. A
    sequence that would end before it starts becomes empty, and later ones keep their lengths while elements are left.
    """
    place = torch.arange(offsets.shape[0], device=offsets.device)
    held = torch.where(place + 1 < offsets.shape[0], offsets.to(torch.int64).clamp(0, total), total)
    held = torch.where(place > 0, held, 0)
    # ONNX has no cumulative maximum. No tensor is empty, because Inductor's code reads beyond one that is padded.
    before = held.index_select(0, (place - 1).clamp(min=0))
    return (held - before).clamp(min=0).cumsum(0).clamp(max=total)


def padded_of_elements(values: Tensor, offsets: Tensor, steps: Any) -> Tensor:
    """Return ``(B, steps, *features)``, padded with zeros."""
    step = torch.arange(steps, device=values.device)
    is_real = step < offsets.diff().unsqueeze(1)
    element = torch.where(is_real, step + offsets[:-1].unsqueeze(1), values.shape[0])
    return torch.cat([values, values.new_zeros(1, *values.shape[1:])])[element]
