"""A linear-chain conditional random field on ragged batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raglane._utils.checks import check_count, check_device, check_dtype, check_kind
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.kernels.graph import has_loops
from raglane.nn.crf import loops, recursions
from raglane.nn.losses.comparison import Reduction, check_reduction, wide
from raglane.ragged import Ragged

_WRAP_IT = "wrap a list of sequences with rl.Ragged"


class CRF(torch.nn.Module):
    """A linear-chain conditional random field, a layer that scores tags together with their
    neighbours.

    The score of the tags ``y`` of a sequence of ``L`` elements with emissions ``e`` is ::

        score(y) = start[y_1] + sum_t e_t[y_t] + sum_t transitions[y_{t-1}, y_t] + end[y_L]
        p(y) = exp(score(y)) / Z,    Z = sum over all C ** L tags of exp(score)

    (Lafferty, McCallum and Pereira, "Conditional random fields: probabilistic models for segmenting
    and labeling sequence data", ICML 2001). Z and the marginals are computed with the
    forward-backward recursions, the best tags with Viterbi's algorithm, in time ``N * C ** 2``.
    Memory in training is a few times ``N * C``.

    The methods take ``emissions``, a Ragged of values ``(N, C)`` of a floating-point dtype, and
    ``tags``, a Ragged of values ``(N,)`` of an integer dtype from 0 to C - 1, with the lengths of
    ``emissions``.

    Scores may be ``-inf``, in emissions and parameters, to forbid a tag or a transition. Gradients
    stay finite as long as a sequence has an allowed path; otherwise log Z is ``-inf`` and the
    likelihood NaN. An empty sequence has one path, of score 0 and probability 1. Computations and
    results have the wider dtype of emissions and parameters, but at least float32; sums over a
    whole sequence are computed in float64.

    Args:
        num_tags: ``C``, the number of tags, at least 1.
        device, dtype: of the parameters.

    Attributes:
        transitions: ``(C, C)``, the score of a tag (row) followed by another (column).
        start: ``(C,)``, the score of each tag as the first of a sequence.
        end: ``(C,)``, the score of each tag as the last.

    The parameters are initialised with 0, so at first each element's tag follows the softmax of its
    emissions.

    Raises:
        ArgumentError: ``num_tags`` is not a whole number of at least 1, or ``dtype`` is not
            floating-point; by a method, a tag is out of range (on a GPU torch's own kernel checks
            that).
        ArgumentTypeError: by a method, an argument is not a Ragged, or has the wrong dtype.
        ShapeError: by a method, shapes, lengths or devices do not match.

    Example:
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
        self,
        num_tags: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_tags = check_count("num_tags", num_tags)
        check_dtype(dtype)
        self.transitions = torch.nn.Parameter(
            torch.empty(num_tags, num_tags, device=device, dtype=dtype)
        )
        self.start = torch.nn.Parameter(torch.empty(num_tags, device=device, dtype=dtype))
        self.end = torch.nn.Parameter(torch.empty(num_tags, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all parameters to 0."""
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, emissions: Ragged, tags: Ragged, reduction: Reduction = "element") -> Tensor:
        """Return the loss, the negative log-likelihood of the tags.

        Args:
            emissions: as for all methods.
            tags: as for all methods.
            reduction: ``"element"``, the sum divided by the number of elements; ``"sequence"``, the
                sum divided by the number of sequences with an element; ``"none"``, the loss of each
                sequence. Without elements it is 0.

        Returns:
            A scalar, or ``(B,)`` for ``"none"``.

        Raises:
            ArgumentError: the reduction is unknown.
        """
        check_reduction(reduction, "'none' and take the mean")
        loss = -self.log_likelihood(emissions, tags)
        if reduction == "none":
            return loss
        if reduction == "element":
            # Not values.shape[0], which a program of torch.export takes to be at least 2.
            return loss.sum() / emissions.lengths.sum().clamp(min=1)
        return loss.sum() / emissions.lengths.count_nonzero().clamp(min=1)

    if TYPE_CHECKING:

        def __call__(  # noqa: D102
            self, emissions: Ragged, tags: Ragged, reduction: Reduction = "element"
        ) -> Tensor: ...

    def log_likelihood(self, emissions: Ragged, tags: Ragged) -> Tensor:
        """Return the log-probability of the tags of each sequence.

        Returns:
            ``(B,)``, each at most 0; 0 for an empty sequence.

        Example:
            >>> CRF(4).log_likelihood(Ragged([torch.zeros(2, 4)]), Ragged([[3, 1]])).exp()
            tensor([0.0625], grad_fn=<ExpBackward0>)
        """
        scores = self._scores(emissions)
        path = recursions.path_score(scores, self._path(emissions, tags), emissions.offsets)
        log_z: Tensor = _chains().log_partition(scores, emissions.host_lengths, emissions.offsets)
        return (path - log_z).to(scores.end.dtype)

    def log_partition(self, emissions: Ragged) -> Tensor:
        """Return log Z, ``(B,)``, the log-sum over all paths; 0 for an empty sequence.

        Example:
            >>> CRF(4).log_partition(Ragged([torch.zeros(2, 4), torch.zeros(0, 4)])).exp().tolist()
            [16.0, 1.0]
        """
        scores = self._scores(emissions)
        log_z: Tensor = _chains().log_partition(scores, emissions.host_lengths, emissions.offsets)
        return log_z.to(scores.end.dtype)

    def marginals(self, emissions: Ragged) -> Ragged:
        """Return the probability of each tag at each element, over all paths.

        It is differentiable, but must be detached within :func:`torch.compile`; backward needs ``N
        * C * C`` numbers.

        Returns:
            Values ``(N, C)``; each row adds up to 1, or is 0 if no path is allowed.

        Example:
            >>> CRF(2).marginals(Ragged([torch.zeros(3, 2)]))[0].tolist()
            [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
        """
        scores = self._scores(emissions)  # Checks emissions.
        return emissions._like(
            _chains().marginals(scores, emissions.host_lengths, emissions.offsets)
        )

    def decode(self, emissions: Ragged) -> tuple[Ragged, Tensor]:
        """Return the best tags of each sequence, computed with Viterbi's algorithm.

        Ties go to the path with the lowest last tag, then the lowest last but one, and so on.

        Returns:
            The tags, ``(N,)`` int64, and their scores ``(B,)``, which are differentiable: minus
            :meth:`log_partition` they are log-likelihoods. An empty sequence has no tags and score
            0.

        Example:
            >>> tags, score = CRF(2).decode(Ragged([torch.tensor([[0., 1.], [3., 2.]])]))
            >>> tags.values.tolist(), score.tolist()
            ([1, 0], [4.0])
        """
        scores = self._scores(emissions)
        tags = _chains().best_tags(scores, emissions.host_lengths, emissions.offsets)
        score = recursions.path_score(scores, tags, emissions.offsets)
        return emissions._like(tags), score.to(scores.end.dtype)

    def extra_repr(self) -> str:
        """Return the number of tags."""
        return f"num_tags={self.num_tags}"

    def _scores(self, emissions: Ragged) -> recursions.Scores:
        """Return the validated scores in the dtype of the computation."""
        check_kind("emissions", emissions, Ragged, "a Ragged batch", _WRAP_IT)
        values = emissions.values
        if not values.is_floating_point():
            fix = "call .to(torch.float32)"
            raise ArgumentTypeError(
                "emissions", str(values.dtype), "of a floating-point dtype", fix
            )
        if values.dim() != 2 or values.shape[1] != self.num_tags:
            rule = f"one score for each of the {self.num_tags} tags"
            fix = "pass the output of a torch.nn.Linear(..., num_tags) for each element"
            raise ShapeError("emissions", f"elements of shape {tuple(values.shape[1:])}", rule, fix)
        check_device("emissions", values, self.transitions.device)
        dtype = wide(torch.promote_types(values.dtype, self.transitions.dtype))
        return recursions.Scores(
            *(scores.to(dtype) for scores in (values, self.start, self.transitions, self.end))
        )

    def _path(self, emissions: Ragged, tags: Ragged) -> Tensor:
        """Return the validated tags, ``(N,)`` int64."""
        check_kind("tags", tags, Ragged, "a Ragged batch", _WRAP_IT)
        path = tags.values
        if path.is_floating_point() or path.is_complex() or path.dtype is torch.bool:
            raise ArgumentTypeError(
                "tags", str(path.dtype), "of an integer dtype", "call .to(torch.int64)"
            )
        if path.dim() != 1:
            fix = "drop the dimension with tags.map(lambda values: values.squeeze(-1))"
            raise ShapeError(
                "tags",
                f"elements of shape {tuple(path.shape[1:])}",
                "one number per element, (N,)",
                fix,
            )
        check_device("tags", path, emissions.device)
        tags._needs_lengths_of("tags", emissions, "the emissions")
        if not torch.compiler.is_compiling() and path.is_cpu and path.shape[0]:
            lowest, highest = map(int, path.aminmax())
            if lowest < 0 or highest >= self.num_tags:
                rule = f"from 0 to num_tags - 1 = {self.num_tags - 1}"
                fix = "drop elements without a tag, or build the CRF with more tags"
                raise ArgumentError("tags", f"values from {lowest} to {highest}", rule, fix)
        return path.long()


def _chains() -> Any:
    """Return the module of the recursions: operators, or loops within an exported graph."""
    return loops if has_loops() else recursions
