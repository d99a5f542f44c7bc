"""A linear-chain conditional random field on ragged batches: likelihood, marginals and the best tags."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane._utils.checks import check_count, check_device, check_dtype, check_kind
from raglane._utils.messages import message
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.kernels.graph import has_loops
from raglane.nn.crf import loops, recursions
from raglane.nn.losses.comparison import Reduction, check_reduction, wide
from raglane.ragged import Ragged

_WRAP_IT = "wrap a list of sequences with rl.Ragged"


class CRF(torch.nn.Module):
    """A linear-chain conditional random field: what a tagger puts on its emissions, so that tags fit their neighbours.

    The score of the tags ``y`` of a sequence of ``L`` elements with emissions ``e`` is ::

        score(y) = start[y_1] + sum_t e_t[y_t] + sum_t transitions[y_{t-1}, y_t] + end[y_L]
        p(y) = exp(score(y)) / Z,    Z = sum over all C ** L tags of exp(score)

    (Lafferty, McCallum and Pereira, "Conditional random fields: probabilistic models for segmenting and labeling
    sequence data", ICML 2001). Z and the marginals are found by the forward-backward recursions, the best tags by
    Viterbi's, in time ``N * C ** 2``; memory in training is a few times ``N * C``.

    Its methods take ``emissions``, a Ragged of values ``(N, C)`` of a floating-point dtype, and ``tags``, a Ragged of
    values ``(N,)`` of an integer dtype, each from 0 to C - 1, with the lengths of ``emissions``.

    Scores may be ``-inf``, in emissions and in the parameters, to forbid a tag or a transition; gradients stay
    finite as long as a sequence has an allowed path. Where it has none, log Z is ``-inf`` and its likelihood NaN.
    An empty sequence has one path, of score 0 and probability 1. Results have the emissions' dtype, but float32 at
    least; computing is in that dtype too, and sums over a whole sequence in float64.

    Args:
        num_tags: ``C``, the number of tags, at least 1.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        transitions: ``(C, C)``, the score of going from a tag (row) to the next (column).
        start: ``(C,)``, the score of each tag as the first of a sequence.
        end: ``(C,)``, the score of each tag as the last.

    The parameters begin at 0: then every element's tag follows the softmax of its emissions.

    Raises:
        ArgumentError: ``num_tags`` is not a whole number of at least 1, or ``dtype`` not floating-point; by a method,
            tags out of range (a GPU's own kernel checks those).
        ArgumentTypeError: by a method: something that is not a Ragged, or of the wrong dtype.
        ShapeError: by a method: shapes, lengths or devices that do not fit.

    Example:
        >>> from raglane import Ragged
        >>> crf = CRF(num_tags=3)
        >>> emissions = Ragged([torch.tensor([[5., 0., 0.], [0., 5., 0.]]), torch.tensor([[0., 0., 5.]])])
        >>> tags, score = crf.decode(emissions)
        >>> [sequence.tolist() for sequence in tags], score.tolist()
        ([[0, 1], [2]], [10.0, 5.0])
        >>> loss = crf(emissions, tags)  # the mean over the elements; reduction="sequence" or "none" for others
        >>> loss.backward()
        >>> crf.transitions.grad.shape
        torch.Size([3, 3])
    """

    def __init__(
        self, num_tags: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.num_tags = check_count("num_tags", num_tags)
        check_dtype(dtype)
        self.transitions = torch.nn.Parameter(torch.empty(num_tags, num_tags, device=device, dtype=dtype))
        self.start = torch.nn.Parameter(torch.empty(num_tags, device=device, dtype=dtype))
        self.end = torch.nn.Parameter(torch.empty(num_tags, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all parameters to 0."""
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, emissions: Ragged, tags: Ragged, reduction: Reduction = "element") -> Tensor:
        """The loss: the negative log-likelihood of the tags.

        Args:
            emissions: as for all methods.
            tags: as for all methods.
            reduction: ``"element"``, the total over the number of elements; ``"sequence"``, the total over the number
                of sequences that have an element; ``"none"``, each sequence's own. The mean of nothing is 0.

        Returns:
            A scalar, or ``(B,)`` for ``"none"``.

        Raises:
            ArgumentError: an unknown reduction.
        """
        check_reduction(reduction)
        loss = -self.log_likelihood(emissions, tags)
        if reduction == "none":
            return loss
        if reduction == "element":
            return loss.sum() / max(emissions.values.shape[0], 1)
        return loss.sum() / emissions.lengths.count_nonzero().clamp(min=1)

    def log_likelihood(self, emissions: Ragged, tags: Ragged) -> Tensor:
        """The logarithm of the probability of the tags of each sequence.

        Returns:
            ``(B,)``, each at most 0; 0 for an empty sequence.

        Example:
            >>> from raglane import Ragged
            >>> CRF(4).log_likelihood(Ragged([torch.zeros(2, 4)]), Ragged([[3, 1]])).exp()
            tensor([0.0625], grad_fn=<ExpBackward0>)
        """
        scores = self._scores(emissions)
        path = recursions.path_score(scores, self._path(emissions, tags), emissions.offsets)
        log_z: Tensor = _chains().log_partition(scores, emissions.host_lengths, emissions.offsets)
        return (path - log_z).to(scores.end.dtype)

    def log_partition(self, emissions: Ragged) -> Tensor:
        """The logarithm of Z, the sum over all paths of each sequence, ``(B,)``; 0 for an empty one.

        Example:
            >>> from raglane import Ragged
            >>> CRF(4).log_partition(Ragged([torch.zeros(2, 4), torch.zeros(0, 4)])).exp().tolist()
            [16.0, 1.0]
        """
        scores = self._scores(emissions)
        log_z: Tensor = _chains().log_partition(scores, emissions.host_lengths, emissions.offsets)
        return log_z.to(scores.end.dtype)

    def marginals(self, emissions: Ragged) -> Ragged:
        """The probability of each tag at each element, over all paths.

        Gradients flow through it, at the price of ``N * C * C`` numbers in the backward pass (and not within
        :func:`torch.compile`).

        Returns:
            Values ``(N, C)``; each row adds up to 1, or is 0 where no path is allowed.

        Example:
            >>> from raglane import Ragged
            >>> CRF(2).marginals(Ragged([torch.zeros(3, 2)]))[0].tolist()
            [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
        """
        scores = self._scores(emissions)
        return emissions._like(_chains().marginals(scores, emissions.host_lengths, emissions.offsets))

    def decode(self, emissions: Ragged) -> tuple[Ragged, Tensor]:
        """The best tags of each sequence, by Viterbi's algorithm.

        Of equally good paths it is the one whose last tag is lowest, among those the one whose last but one is
        lowest, and so on.

        Returns:
            The tags, ``(N,)`` int64; and their scores ``(B,)``, through which gradients flow: less
            :meth:`log_partition` they are log-likelihoods. An empty sequence has no tags and score 0.

        Example:
            >>> from raglane import Ragged
            >>> tags, score = CRF(2).decode(Ragged([torch.tensor([[0., 1.], [3., 2.]])]))
            >>> tags.values.tolist(), score.tolist()
            ([1, 0], [4.0])
        """
        scores = self._scores(emissions)
        tags = _chains().best_tags(scores, emissions.host_lengths, emissions.offsets)
        score = recursions.path_score(scores, tags, emissions.offsets)
        return emissions._like(tags), score.to(scores.end.dtype)

    def extra_repr(self) -> str:
        """The number of tags."""
        return f"num_tags={self.num_tags}"

    def _scores(self, emissions: Ragged) -> recursions.Scores:
        """The scores, checked and in the dtype of the computation."""
        check_kind("emissions", emissions, Ragged, "a Ragged batch", _WRAP_IT)
        values = emissions.values
        if not values.is_floating_point():
            fix = "call .to(torch.float32)"
            raise ArgumentTypeError(message("emissions", str(values.dtype), "of a floating-point dtype", fix))
        if values.dim() != 2 or values.shape[1] != self.num_tags:
            rule = f"one score for each of the {self.num_tags} tags, per element"
            fix = "pass the output of a torch.nn.Linear(..., num_tags)"
            raise ShapeError(message("emissions", f"elements of shape {tuple(values.shape[1:])}", rule, fix))
        check_device("emissions", values, self.transitions.device)
        dtype = wide(torch.promote_types(values.dtype, self.transitions.dtype))
        return recursions.Scores(*(part.to(dtype) for part in (values, self.start, self.transitions, self.end)))

    def _path(self, emissions: Ragged, tags: Ragged) -> Tensor:
        """The tags, ``(N,)`` int64, checked."""
        check_kind("tags", tags, Ragged, "a Ragged batch", _WRAP_IT)
        path = tags.values
        if path.is_floating_point() or path.is_complex() or path.dtype is torch.bool:
            raise ArgumentTypeError(message("tags", str(path.dtype), "of an integer dtype", "call .to(torch.int64)"))
        if path.dim() != 1:
            rule = "one number per element, (N,)"
            fix = "drop the dimension with tags.map(lambda values: values.squeeze(-1))"
            raise ShapeError(message("tags", f"elements of shape {tuple(path.shape[1:])}", rule, fix))
        check_device("tags", path, emissions.device)
        tags._needs_lengths_of("tags", emissions, "the emissions have")
        if not torch.compiler.is_compiling() and path.is_cpu and path.shape[0]:
            lowest, highest = map(int, path.aminmax())
            if lowest < 0 or highest >= self.num_tags:
                rule = f"from 0 to num_tags - 1 = {self.num_tags - 1}"
                fix = "drop elements without a tag, or build the CRF with more tags"
                raise ArgumentError(message("tags", f"values from {lowest} to {highest}", rule, fix))
        return path.long()


def _chains() -> Any:
    """The module of the recursions: operators, or for a graph with loops of its own, those."""
    return loops if has_loops() else recursions
