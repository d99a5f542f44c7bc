"""The running batch of a beam search.

NOTE [lanes]: a row is a hypothesis that can still become a result. Rows of items that are done
leave, and waiting items take their place. Rows are in the order of their items' slots, and those of
an item in the order of their scores, so that a stable sort breaks ties by the better hypothesis,
and then by the lowest token.

NOTE [tree]: outputs are paths of a tree. Each step adds nodes, each with its token, frame and the
node before it. The paths of the results are read once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from raglane import segments
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn.transduction.hypotheses import Hypotheses
from raglane.ragged import Ragged

_NEVER = float("-inf")  # the logarithm of probability 0


class Rules(NamedTuple):
    """The validated arguments of a search; tensors are ``(B,)`` int64."""

    step: Callable[[Tensor, Any], tuple[Tensor, Any]]
    penalty: Callable[[Any], Tensor] | None
    constraint: Callable[[Ragged, Tensor, Tensor], Tensor] | None
    beam: int
    n_best: int
    alpha: float  # the exponent of the length penalty
    most: Tensor  # the most tokens of an output
    end: int  # the end or silent token, -1 for none
    frames: Tensor | None  # the number of silent tokens that finish a hypothesis

    def scaled(self, totals: Tensor, lengths: Tensor) -> Tensor:
        """Return log-probabilities divided by the length penalty."""
        return totals if self.alpha == 0 else totals / ((5 + lengths.double()) / 6) ** self.alpha


class Outputs(NamedTuple):
    """The outputs of hypotheses: the columns of an int64 matrix, which rows are selected from."""

    position: Tensor  # the item's slot times ``beam`` plus the rank in the item
    node: Tensor  # the end of the output in the tree, -1 for an empty one
    length: Tensor
    frame: Tensor  # the number of silent tokens
    label: Tensor  # the last token of the output, -1 for an empty one
    hash: Tensor

    def stack(self) -> Tensor:
        """Return the matrix."""
        return torch.stack(self, -1)


class SearchLanes:
    """A search: running rows, waiting items, the tree of outputs and the finished hypotheses."""

    def __init__(self, rules: Rules, starts: Tensor, initial: Any, slots: int) -> None:
        self.rules = rules
        self.starts = starts
        self.initial = initial
        self.slots = slots
        none = starts[:0]
        # Of the R running hypotheses: the last tokens, which the next step reads; the
        # log-probabilities; and the matrix of outputs, ``(R, 6)``.
        self.tokens = none
        self.scores = none.double()
        self.matrix = none.new_zeros(0, 6)
        self.state: Any = None
        self.items = none  # of the slots in use
        self.tree: list[tuple[Tensor, ...]] = []
        self.nodes = 0
        shape = (starts.shape[0], rules.n_best)
        # The finished hypotheses of each item, the best first.
        self.best = (
            none.new_full(shape, 0).double() + _NEVER,
            none.new_full(shape, -1),
            none.new_zeros(shape),
        )
        self.dtype = torch.get_default_dtype()
        # Where nothing can follow, the empty output is the only one.
        bound = rules.most if rules.frames is None else rules.frames
        self.best[0][:, 0].masked_fill_(bound == 0, 0.0)
        # Longest first, as in lanes of sequences.
        longest = bound if rules.frames is None else bound + rules.most
        order = longest.argsort(descending=True, stable=True)
        self.waiting = order[bound[order] > 0]

    def admit(self) -> bool:
        """Move waiting items to free slots; return False if no item runs."""
        used = self.items.shape[0]
        new = self.waiting[: self.slots - used]
        count = new.shape[0]
        if count:
            self.waiting = self.waiting[count:]
            zeros = new.new_zeros(count)
            none = zeros - 1
            slots = used + torch.arange(count, device=new.device)
            empty = Outputs(slots * self.rules.beam, none, zeros, zeros, none, zeros)
            self.tokens = torch.cat([self.tokens, self.starts[new]])
            self.scores = torch.cat([self.scores, self.scores.new_zeros(count)])
            self.matrix = torch.cat([self.matrix, empty.stack()])
            entering = _select(self.initial, new)
            if used:
                entering = pytree.tree_map(
                    lambda a, b: torch.cat([a, b.to(a.dtype)]), self.state, entering
                )
            self.state = entering
            self.items = torch.cat([self.items, new])
        return self.items.shape[0] > 0

    @property
    def outputs(self) -> Outputs:
        """The outputs of the running hypotheses."""
        return Outputs(*self.matrix.unbind(1))

    def advance(self) -> None:
        """Extend all hypotheses by one token."""
        rules = self.rules
        positions = self.outputs.position
        log_probs = self._log_probs()
        grid = positions.new_full((self.items.shape[0] * rules.beam,), -1)
        origins = torch.arange(positions.shape[0], device=positions.device)
        grid[positions] = origins
        grid = grid.view(-1, rules.beam)
        silences = None
        if rules.frames is not None:
            log_probs, silences, origins = self._merged(log_probs, grid)
        tokens, scores = likeliest(log_probs, rules.beam + 1)
        scores = scores + self.scores.unsqueeze(1)
        if silences is not None:
            tokens = torch.cat([torch.full_like(tokens[:, :1], rules.end), tokens], 1)
            scores = torch.cat([silences.unsqueeze(1), scores], 1)
        width = tokens.shape[1]
        totals = scores.new_full((grid.numel(), width), _NEVER).index_copy(0, positions, scores)
        totals, order = totals.view(grid.shape[0], -1).sort(dim=1, descending=True, stable=True)
        # At most one extension of a row is by the end or silent token, so these include ``beam``
        # others.
        totals = totals[:, : 2 * rules.beam]
        order = order[:, : 2 * rules.beam]
        parents = grid.gather(1, order // width).clamp_(min=0)
        self._replace(totals, parents, tokens[parents, order % width], origins)

    def _items_of(self, chosen: Tensor | slice = slice(None)) -> Tensor:
        """Return the items of chosen rows."""
        return self.items[self.outputs.position[chosen] // self.rules.beam]

    def _replace(self, totals: Tensor, parents: Tensor, tokens: Tensor, origins: Tensor) -> None:
        """Replace rows by their best extensions, ``(slots, 2 * beam)``, and keep the finished ones.

        ``origins`` are the rows whose outputs in the tree the extensions by the silent token
        continue.
        """
        rules = self.rules
        items = self.items
        before = Outputs(*self.matrix[parents].unbind(2))
        fresh = torch.arange(self.nodes, self.nodes + totals.numel(), device=totals.device).view_as(
            totals
        )
        self.nodes += totals.numel()
        is_label = tokens != rules.end
        origin = torch.where(is_label, parents, origins[parents])
        labels = torch.where(is_label, tokens, before.label)
        hashes = hashed(before.hash, tokens, is_label)
        continued = Outputs(*self.matrix[origin].flatten(0, 1).unbind(1))
        self.tree.append((labels.flatten(), continued.node, continued.frame))
        nodes = torch.where(is_label | (origin != parents), fresh, before.node)
        lengths = before.length + is_label
        frames = before.frame + ~is_label
        if rules.frames is None:
            is_done = ~is_label | (lengths == rules.most[items].unsqueeze(1))
        else:
            is_done = frames == rules.frames[items].unsqueeze(1)
        is_there = totals > _NEVER
        continues = is_there & ~is_done
        continues &= continues.cumsum(1) <= rules.beam
        is_done = (is_done & is_there)[:, : rules.beam]
        if bool(is_done.any()):
            self._keep(totals, parents, nodes, lengths, is_done)
        continues &= self._bound(totals, lengths, continues) > self.best[0][items, -1:]
        remains = continues.any(1)
        slots = (remains.cumsum(0) - 1).unsqueeze(1)
        positions = slots * rules.beam + continues.cumsum(1) - 1
        matrix = Outputs(positions, nodes, lengths, frames, labels, hashes).stack()
        self.tokens = tokens[continues]
        self.scores = totals[continues]
        self.matrix = matrix[continues]
        self.state = _select(self.state, parents[continues])
        self.items = items[remains]

    def _log_probs(self) -> Tensor:
        """Run the step, and return the log-probabilities ``(R, V)`` after the constraint."""
        rules = self.rules
        count = self.tokens.shape[0]
        result: Any = rules.step(self.tokens, self.state)
        if not isinstance(result, tuple) or len(result) != 2:
            got = f"a {type(result).__name__}"
            rule = "a function that returns (log_probs, state)"
            raise ArgumentTypeError("step", got, rule, "return both")
        log_probs, self.state = result
        check_rows("step: state", self.state, count, "one row per token")
        log_probs = self._checked("step", log_probs, (count, -1))
        self.dtype = log_probs.dtype
        if rules.end >= log_probs.shape[1]:
            rule = f"below {log_probs.shape[1]}, the number of log-probabilities that step returns"
            name = "end" if rules.frames is None else "silent"
            raise ArgumentError(name, f"{rules.end}", rule, "pass one of the tokens")
        if rules.constraint is not None:
            outputs = self.outputs
            tokens, _ = self._read(outputs.node, outputs.length)
            prefixes = Ragged._build(tokens, outputs.length.cpu())
            constrained = rules.constraint(prefixes, self._items_of(), log_probs)
            log_probs = self._checked("constraint", constrained, tuple(log_probs.shape))
        return log_probs

    def _checked(self, name: str, result: Any, shape: tuple[int, ...]) -> Tensor:
        """Return a function's result; raise unless it has the shape (-1: any) and only numbers."""
        is_tensor = (
            isinstance(result, Tensor) and result.is_floating_point() and result.dim() == len(shape)
        )
        if not is_tensor or any(
            expected not in (-1, size) for expected, size in zip(shape, result.shape, strict=True)
        ):
            got = (
                f"{result.dtype} of shape {tuple(result.shape)}"
                if isinstance(result, Tensor)
                else type(result).__name__
            )
            rule = f"a function that returns floating-point numbers of shape {shape}".replace(
                "-1", "V"
            )
            raise ShapeError(
                name, got, rule, "return a row per token or row that it was called with"
            )
        is_wrong = ~(result < float("inf"))
        if bool(is_wrong.any()):
            item = int(self._items_of(is_wrong.view(shape[0], -1).any(1))[0])
            rule = "a function that returns finite numbers or -inf"
            fix = "check the data and the weights of the model"
            raise ArgumentError(name, f"NaN or infinity for item {item}", rule, fix)
        return result

    def _merged(self, log_probs: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of labels, scores after the silent token, and the rows whose
        outputs those continue.

        Row i after the silent token and row j after the last token of i have the same output, if
        that of i is that of j and this token. Their sum replaces both. The third result is j if it
        is the more probable one, else i. ``grid`` has the row of each position, -1 if it is free.
        """
        position, _, lengths, _, labels, hashes = self.outputs
        peers = grid[position // self.rules.beam]  # ``(R, beam)``, the rows of the same item
        last = labels.unsqueeze(1)
        is_prefix = (peers >= 0) & (lengths[peers] + 1 == lengths.unsqueeze(1))
        is_prefix &= hashed(hashes[peers], last, last >= 0) == hashes.unsqueeze(1)
        has_prefix = is_prefix.any(1)
        prefix = peers.gather(1, is_prefix.int().argmax(1, keepdim=True)).squeeze(1)
        by_label = (log_probs[prefix, labels] + self.scores[prefix]).masked_fill(
            ~has_prefix, _NEVER
        )
        by_silence = log_probs[:, self.rules.end] + self.scores
        origins = torch.where(by_label > by_silence, prefix, grid.flatten()[position])
        log_probs = log_probs.masked_fill(
            (lengths >= self.rules.most[self._items_of()]).unsqueeze(1), _NEVER
        )
        log_probs[:, self.rules.end] = _NEVER
        log_probs[prefix[has_prefix], labels[has_prefix]] = _NEVER
        return log_probs, torch.logaddexp(by_label, by_silence), origins

    def _keep(
        self, totals: Tensor, parents: Tensor, nodes: Tensor, lengths: Tensor, is_done: Tensor
    ) -> None:
        """Insert the finished of the ``beam`` best extensions into the best of their items."""
        beam = is_done.shape[1]
        finals = self.rules.scaled(totals, lengths)[:, :beam].masked_fill(~is_done, _NEVER)
        if self.rules.penalty is not None:
            extra = self._checked(
                "penalty", self.rules.penalty(self.state), tuple(self.tokens.shape)
            )
            finals = finals + extra[parents[:, :beam]]
        new = (finals, nodes[:, :beam], lengths[:, :beam])
        joined = [
            torch.cat([best[self.items], values], 1)
            for best, values in zip(self.best, new, strict=True)
        ]
        order = joined[0].argsort(dim=1, descending=True, stable=True)[:, : self.rules.n_best]
        for best, values in zip(self.best, joined, strict=True):
            best[self.items] = values.gather(1, order)

    def _bound(self, totals: Tensor, lengths: Tensor, continues: Tensor) -> Tensor:
        """Return the best score that continuing extensions can reach, each or all of an item."""
        rules = self.rules
        if rules.frames is not None:
            # Merged hypotheses reach at most the sum of all.
            totals = totals.masked_fill(~continues, _NEVER).logsumexp(1, keepdim=True)
            lengths = lengths.amin(1, keepdim=True)
        if rules.alpha > 0:
            lengths = rules.most[self.items].unsqueeze(1)
        return rules.scaled(totals, lengths)

    def hypotheses(self) -> Hypotheses:
        """Return the finished hypotheses."""
        scores, nodes, lengths = self.best
        is_there = scores > _NEVER
        lengths = lengths[is_there]
        values, frames = self._read(nodes[is_there], lengths)
        tokens = Ragged._build(values, lengths.cpu())
        times = (
            None
            if self.rules.frames is None
            else tokens._like(torch.stack([frames, frames + 1], 1))
        )
        offsets = segments.offsets_from_lengths(is_there.sum(1))
        return Hypotheses(tokens, scores[is_there].to(self.dtype), offsets, times)

    def _read(self, nodes: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens and frames of the paths to nodes, flat."""
        if len(self.tree) > 1:
            self.tree = [tuple(map(torch.cat, zip(*self.tree, strict=True)))]
        ends = lengths.cumsum(0)
        total = int(ends[-1]) if ends.shape[0] else 0
        path = nodes.new_empty(total)
        for back in range(int(lengths.max()) if total else 0):
            is_longer = lengths > back
            ends = ends[is_longer]
            lengths = lengths[is_longer]
            nodes = nodes[is_longer]
            path[ends - 1 - back] = nodes
            nodes = self.tree[0][1][nodes]
        if not total:
            return path, path
        return self.tree[0][0][path], self.tree[0][2][path]


def likeliest(log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens of each row and their scores; of equal ones, the lowest first.

    ``torch.topk`` chooses among equal numbers arbitrarily.
    """
    most = log_probs.shape[1]
    count = min(count, most)
    # One more, which shows if equal numbers are left out.
    tokens = log_probs.topk(min(count + 1, most), 1, sorted=False).indices.sort(1).values
    values, order = log_probs.gather(1, tokens).sort(dim=1, descending=True, stable=True)
    tokens = tokens.gather(1, order)
    if count < most:
        is_cut = (values[:, -2] == values[:, -1]) & (values[:, -1] > _NEVER)
        if bool(is_cut.any()):
            tokens[is_cut] = log_probs[is_cut].argsort(dim=1, descending=True, stable=True)[
                :, : count + 1
            ]
    return tokens[:, :count], values[:, :count]


def hashed(hashes: Tensor, tokens: Tensor, is_label: Tensor) -> Tensor:
    """Return hashes, 64 bits, of outputs after one more token, or unchanged."""
    return torch.where(
        is_label, (hashes ^ (hashes >> 29)) * 0x3F58476D1CE4E5B9 + tokens + 1, hashes
    )


def check_rows(name: str, state: Any, count: int, rule: str) -> None:
    """Raise unless a state consists of tensors with ``count`` rows."""
    for leaf in pytree.tree_leaves(state):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != count:
            got = (
                f"a tensor of shape {tuple(leaf.shape)}"
                if isinstance(leaf, Tensor)
                else f"a {type(leaf).__name__}"
            )
            fix = "put item numbers into the state, and keep other data out of it"
            raise ShapeError(name, got, f"tensors with {rule}, ({count}, ...)", fix)


def _select(state: Any, index: Tensor) -> Any:
    """Return rows of all tensors of a state."""
    return pytree.tree_map(lambda leaf: leaf.index_select(0, index), state)
