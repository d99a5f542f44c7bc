"""The running batch of a beam search.

NOTE [lanes]: a row is a hypothesis that can still become a result. Rows of items that are done leave, and waiting items
take their place. Rows are in the order of their items' slots, and those of an item in the order of their scores, so
that a stable sort breaks ties by the better hypothesis, and then by the lowest token.

NOTE [tree]: outputs are paths of a tree. Each step adds nodes, each with its token, frame and the node before it. The
paths of the results are read once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from raglane import segments
from raglane._utils.messages import message
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn.transduction.hypotheses import Hypotheses
from raglane.ragged import Ragged

_NEVER = float("-inf")  # the logarithm of probability 0


class Rules(NamedTuple):
    """The validated arguments of a search; tensors are ``(B,)`` int64."""

    beam: int
    n_best: int
    alpha: float  # the exponent of the length penalty
    most: Tensor  # the most tokens of an output
    end: int  # -1 for none
    silent: int  # -1 for none
    frames: Tensor | None

    def factor(self, lengths: Tensor) -> Tensor:
        """Return the divisor of the log-probability of outputs of these lengths."""
        return ((5 + lengths.double()) / 6) ** self.alpha


class _Rows(NamedTuple):
    """The R running hypotheses, ``(R,)`` each; see NOTE [lanes]."""

    slots: Tensor  # the place of the item among those that run
    tokens: Tensor  # the last token, which the next step reads
    scores: Tensor  # the log-probability, float64
    nodes: Tensor  # the end of the output in the tree; -1 for an empty output
    lengths: Tensor  # of the output
    frames: Tensor  # the number of silent tokens
    labels: Tensor  # the last token of the output; -1 for an empty output
    prints: Tensor  # a hash of the output


class Lanes:
    """The state of a search: running rows, waiting items, the tree of outputs and the finished hypotheses."""

    def __init__(
        self,
        rules: Rules,
        step: Callable[[Tensor, Any], tuple[Tensor, Any]],
        penalty: Callable[[Any], Tensor] | None,
        constraint: Callable[[Ragged, Tensor, Tensor], Tensor] | None,
        starts: Tensor,
        initial: Any,
        slots: int,
    ) -> None:
        self.rules, self.step, self.penalty, self.constraint = rules, step, penalty, constraint
        self.starts, self.initial, self.slots = starts, initial, slots
        none = starts[:0]
        self.rows = _Rows(none, none, none.double(), none, none, none, none, none)
        self.state: Any = None
        self.items = none  # of the slots in use
        self.tree: list[tuple[Tensor, Tensor, Tensor]] = []
        self.nodes = 0
        shape = (starts.shape[0], rules.n_best)
        # The finished hypotheses of each item, the best first.
        self.best = (none.new_full(shape, 0).double() + _NEVER, none.new_full(shape, -1), none.new_zeros(shape))
        self.dtype, self.vocabulary = torch.get_default_dtype(), -1
        # Where nothing can follow, the empty output is the only one.
        bound = rules.most if rules.frames is None else rules.frames
        self.best[0][:, 0].masked_fill_(bound == 0, 0.0)
        # Longest first, as in lanes of sequences.
        order = (bound + (0 if rules.frames is None else rules.most)).argsort(descending=True, stable=True)
        self.waiting = order[bound[order] > 0]

    def admit(self) -> bool:
        """Move waiting items to free slots; return False if no item runs."""
        used = self.items.shape[0]
        new = self.waiting[: self.slots - used]
        if new.shape[0]:
            self.waiting = self.waiting[new.shape[0] :]
            zeros = torch.zeros_like(new)
            slots = used + torch.arange(new.shape[0], device=new.device)
            rows = _Rows(slots, self.starts[new], zeros.double(), zeros - 1, zeros, zeros, zeros - 1, zeros)
            self.rows = _Rows(*map(torch.cat, zip(self.rows, rows, strict=True)))
            entering = _select(self.initial, new)
            self.state = entering if not used else pytree.tree_map(_joined, self.state, entering)
            self.items = torch.cat([self.items, new])
        return self.items.shape[0] > 0

    def advance(self) -> None:
        """Extend all hypotheses by one token."""
        rules, rows, slots = self.rules, self.rows, self.items.shape[0]
        log_probs = self._log_probs()
        counts = torch.bincount(rows.slots, minlength=slots)
        first = counts.cumsum(0) - counts
        places = rows.slots * rules.beam + torch.arange(log_probs.shape[0], device=first.device) - first[rows.slots]
        tokens, scores = likeliest(log_probs, rules.beam + 1)
        if bool(scores[:, 0].isnan().any()):  # NaN is the largest number for torch.topk
            item = int(self.items[rows.slots[scores[:, 0].isnan()][0]])
            name, rule = "step" if self.constraint is None else "step, constraint", "without NaN"
            fix = "check the data and the weights of the model"
            raise ArgumentError(message(f"{name}: log_probs", f"NaN for item {item}", rule, fix))
        scores = scores.double() + rows.scores.unsqueeze(1)
        other = None
        if rules.frames is not None:
            tokens, scores, other = self._merged(log_probs, places, tokens, scores)
        width = tokens.shape[1]
        totals = scores.new_full((slots * rules.beam, width), _NEVER).index_copy(0, places, scores)
        totals, order = totals.view(slots, -1).sort(dim=1, descending=True, stable=True)
        # At most one extension of a row is by the end or silent token, so these include ``beam`` others.
        totals, order = totals[:, : 2 * rules.beam], order[:, : 2 * rules.beam]
        parents = torch.where(totals > _NEVER, first.unsqueeze(1) + order // width, 0)
        self._replace(totals, parents, tokens[parents, order % width], other)

    def _replace(self, totals: Tensor, parents: Tensor, tokens: Tensor, other: Tensor | None) -> None:
        """Replace the rows by their best extensions, ``(slots, 2 * beam)`` in order, and keep the finished ones."""
        rules, rows, items = self.rules, self.rows, self.items
        is_silent = tokens == rules.silent
        is_label = ~is_silent & (tokens != rules.end)
        labels = torch.where(is_label, tokens, rows.labels[parents])
        lengths, frames = rows.lengths[parents] + is_label, rows.frames[parents] + is_silent
        before, is_new = parents, is_label
        if other is not None:
            is_moved = is_silent & (other[parents] >= 0)
            before, is_new = torch.where(is_moved, other[parents], parents), is_label | is_moved
        self.tree.append((labels.flatten(), rows.nodes[before].flatten(), rows.frames[before].flatten()))
        fresh = self.nodes + torch.arange(totals.numel(), device=totals.device).view_as(totals)
        self.nodes += totals.numel()
        nodes = torch.where(is_new, fresh, rows.nodes[parents])
        if rules.frames is None:
            is_done = (tokens == rules.end) | (lengths == rules.most[items].unsqueeze(1))
        else:
            is_done = frames == rules.frames[items].unsqueeze(1)
        continues = (totals > _NEVER) & ~is_done
        continues &= continues.cumsum(1) <= rules.beam
        is_done &= totals > _NEVER
        is_done[:, rules.beam :] = False
        if bool(is_done.any()):
            self._keep(totals.masked_fill(~is_done, _NEVER), parents, nodes, lengths)
        continues &= self._bound(totals.masked_fill(~continues, _NEVER), lengths) > self.best[0][items, -1:]
        chosen = continues.flatten().nonzero().squeeze(1)
        remains = continues.any(1)
        slots = (remains.cumsum(0) - 1)[chosen // totals.shape[1]]
        parts = (tokens, totals, nodes, lengths, frames, labels, hashed(rows.prints[parents], tokens, is_label))
        self.rows = _Rows(slots, *(part.flatten()[chosen] for part in parts))
        self.state = _select(self.state, parents.flatten()[chosen])
        self.items = items[remains]

    def _log_probs(self) -> Tensor:
        """Run the step, and return the log-probabilities ``(R, V)`` after the constraint."""
        rows, rules = self.rows, self.rules
        count = rows.tokens.shape[0]
        given: Any = self.step(rows.tokens, self.state)
        if not isinstance(given, tuple) or len(given) != 2:
            got, rule = f"a {type(given).__name__}", "a function that returns (log_probs, state)"
            raise ArgumentTypeError(message("step", got, rule, "return both"))
        given, self.state = given
        check_rows("step: state", self.state, count, "one row per token")
        log_probs: Tensor = self._checked("step", given)
        if self.vocabulary < 0:
            self.dtype, self.vocabulary = log_probs.dtype, log_probs.shape[1]
            for name, token in (("end", rules.end), ("silent", rules.silent)):
                if token >= self.vocabulary:
                    rule = f"below {self.vocabulary}, the number of log-probabilities that step returns"
                    raise ArgumentError(message(name, f"{token}", rule, "pass one of the tokens"))
        if self.constraint is not None:
            values, _ = self._outputs(rows.nodes, rows.lengths)
            prefixes = Ragged._build(values, rows.lengths.cpu())
            log_probs = self._checked("constraint", self.constraint(prefixes, self.items[rows.slots], log_probs))
        return log_probs

    def _checked(self, name: str, given: Any) -> Any:
        """Return log-probabilities; raise unless they are ``(R, V)``."""
        rows, width = self.rows.tokens.shape[0], self.vocabulary
        is_tensor = isinstance(given, Tensor) and given.is_floating_point()
        if not is_tensor or given.dim() != 2 or given.shape[0] != rows or given.shape[1] != max(width, given.shape[1]):
            got = f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            rule = f"a function that returns log-probabilities ({rows}, {'V' if width < 0 else width})"
            raise ShapeError(message(name, got, rule, "return a row per token that it was called with"))
        return given

    def _merged(
        self, log_probs: Tensor, places: Tensor, tokens: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the extensions with the silent one first, and the rows whose extensions were merged into those.

        Row i after the silent token and row j after the last token of i have the same output, if that of i is that of j
        and this token. Their sum replaces both. The third result is j if it is the more probable one, else -1.
        """
        rules, rows = self.rules, self.rows
        is_full = rows.lengths >= rules.most[self.items[rows.slots]]
        scores = scores.masked_fill((tokens == rules.silent) | is_full.unsqueeze(1), _NEVER)
        grid = places.new_full((self.items.shape[0] * rules.beam,), -1)
        grid[places] = torch.arange(places.shape[0], device=places.device)
        peers = grid.view(-1, rules.beam)[rows.slots]  # ``(R, beam)``, the rows of the same item
        labels = rows.labels.unsqueeze(1)
        is_prefix = (peers >= 0) & (rows.lengths[peers] + 1 == rows.lengths.unsqueeze(1))
        is_prefix &= hashed(rows.prints[peers], labels, labels >= 0) == rows.prints.unsqueeze(1)
        has = is_prefix.any(1)
        prefix = peers.gather(1, is_prefix.int().argmax(1, keepdim=True)).squeeze(1)
        by_label = log_probs[prefix, rows.labels].double() + rows.scores[prefix]
        by_label = by_label.masked_fill(~has, _NEVER)
        by_silence = log_probs[:, rules.silent].double() + rows.scores
        # The merged extensions of row j are by the labels of its peers whose prefix is j.
        is_child = (peers >= 0) & has[peers] & (prefix[peers] == grid[places].unsqueeze(1))
        taken = (tokens.unsqueeze(2) == rows.labels[peers].unsqueeze(1)) & is_child.unsqueeze(1)
        scores = scores.masked_fill(taken.any(2), _NEVER)
        silence = torch.full_like(labels, rules.silent)
        both = torch.logaddexp(by_label, by_silence).unsqueeze(1)
        other = torch.where(by_label > by_silence, prefix, -1)
        return torch.cat([silence, tokens], 1), torch.cat([both, scores], 1), other

    def _keep(self, totals: Tensor, parents: Tensor, nodes: Tensor, lengths: Tensor) -> None:
        """Insert finished extensions, those above -inf, into the best of their items."""
        finals = totals / self.rules.factor(lengths)
        if self.penalty is not None:
            extra = self.penalty(self.state)
            if not isinstance(extra, Tensor) or extra.shape != self.rows.tokens.shape or bool(extra.isnan().any()):
                got = f"a tensor {tuple(extra.shape)}, or NaN" if isinstance(extra, Tensor) else type(extra).__name__
                rule = f"a function that returns numbers {tuple(self.rows.tokens.shape)}"
                raise ShapeError(message("penalty", got, rule, "return a number per row of the state"))
            finals = finals + extra.double()[parents]
        new = (finals, nodes, lengths)
        both = [torch.cat([old[self.items], part], 1) for old, part in zip(self.best, new, strict=True)]
        order = both[0].argsort(dim=1, descending=True, stable=True)[:, : self.rules.n_best]
        for old, part in zip(self.best, both, strict=True):
            old[self.items] = part.gather(1, order)

    def _bound(self, totals: Tensor, lengths: Tensor) -> Tensor:
        """Return the best score that each continuing extension can reach."""
        factor = torch.maximum(self.rules.factor(lengths), self.rules.factor(self.rules.most[self.items].unsqueeze(1)))
        if self.rules.frames is None:
            return totals / factor
        # Merged hypotheses reach at most the sum of all.
        return totals.logsumexp(1, keepdim=True) / factor.amax(1, keepdim=True)

    def found(self) -> Hypotheses:
        """Return the finished hypotheses."""
        scores, nodes, lengths = self.best
        is_there = scores > _NEVER
        kept = lengths[is_there]
        values, frames = self._outputs(nodes[is_there], kept)
        tokens = Ragged._build(values, kept.cpu())
        times = None if self.rules.frames is None else tokens._like(torch.stack([frames, frames + 1], 1))
        offsets = segments.offsets_from_lengths(is_there.sum(1))
        return Hypotheses(tokens, scores[is_there].to(self.dtype), offsets, times)

    def _outputs(self, nodes: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens and frames of the paths to nodes, flat."""
        if len(self.tree) > 1:
            self.tree = [tuple(map(torch.cat, zip(*self.tree, strict=True)))]  # type: ignore[list-item]
        ends = lengths.cumsum(0)
        total = int(ends[-1]) if ends.shape[0] else 0
        path = nodes.new_empty(total)
        for back in range(int(lengths.max()) if total else 0):
            is_longer = lengths > back
            ends, lengths, nodes = ends[is_longer], lengths[is_longer], nodes[is_longer]
            path[ends - 1 - back] = nodes
            nodes = self.tree[0][1][nodes]
        if not total:
            return path, path
        return self.tree[0][0][path], self.tree[0][2][path]


def likeliest(log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` likeliest tokens of each row, and their log-probabilities; of equal ones, the lowest first.

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
            tokens[is_cut] = log_probs[is_cut].argsort(dim=1, descending=True, stable=True)[:, : count + 1]
    return tokens[:, :count], values[:, :count]


def hashed(prints: Tensor, tokens: Tensor, is_label: Tensor) -> Tensor:
    """Return hashes, 64 bits, of outputs after one more token, or unchanged."""
    mixed = (prints ^ (tokens + 0x1E3779B97F4A7C15)) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 29)) * 0x14D049BB133111EB
    return torch.where(is_label, mixed ^ (mixed >> 32), prints)


def check_rows(name: str, state: Any, count: int, rule: str) -> None:
    """Raise unless a state consists of tensors with ``count`` rows."""
    for part in pytree.tree_leaves(state):
        if not isinstance(part, Tensor) or part.dim() == 0 or part.shape[0] != count:
            got = f"a tensor of shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
            fix = "put item numbers into the state, and keep other data out of it"
            raise ShapeError(message(name, got, f"tensors with {rule}, ({count}, ...)", fix))


def _select(state: Any, index: Tensor) -> Any:
    """Return rows of all tensors of a state."""
    return pytree.tree_map(lambda part: part.index_select(0, index), state)


def _joined(running: Tensor, new: Tensor) -> Tensor:
    return torch.cat([running, new.to(running.dtype)])
