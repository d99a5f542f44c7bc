"""A linear-chain conditional random field on ragged batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raglane._utils.checks import check_count, check_device, check_dtype, check_kind
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.kernels.graph import has_loops
from raglane.nn.crf import loops, recursions
from raglane.nn.losses.comparison import LabelReduction, check_label_reduction, wide
from raglane.ragged import Ragged

_WRAP_IT = "wrap a list of sequences with rl.Ragged"


class CRF(torch.nn.Module):
    """A linear-chain conditional random field, a layer that scores tags together with their
    neighbours.

    The score of the tags ``y`` of a sequence of ``L`` elements with emissions ``e`` is ::

        score(y) = start_transitions[y_1] + sum_t e_t[y_t] + sum_t transitions[y_{t-1}, y_t]
                   + end_transitions[y_L]
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
        start_transitions: ``(C,)``, the score of each tag as the first of a sequence.
        end_transitions: ``(C,)``, the score of each tag as the last.

    The ``state_dict`` is that of pytorch-crf, whose calls mean the same: ``-crf(emissions, tags)``
    is a loss. The parameters are initialised with 0, so at first each element's tag follows the softmax of its
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
        >>> tags = crf.decode(emissions)
        >>> tags.tolist(), crf.score(emissions, tags).tolist()
        ([[0, 1], [2]], [10.0, 5.0])
        >>> loss = crf.loss(emissions, tags)
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
        self.start_transitions = torch.nn.Parameter(
            torch.empty(num_tags, device=device, dtype=dtype)
        )
        self.end_transitions = torch.nn.Parameter(torch.empty(num_tags, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all parameters to 0."""
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, emissions: Ragged, tags: Ragged, reduction: LabelReduction = "sum") -> Tensor:
        """Return the log-likelihood of the tags, as pytorch-crf does: the higher, the better.

        Args:
            emissions: as for all methods.
            tags: as for all methods.
            reduction: ``"sum"`` or ``"mean"`` over the sequences, or ``"none"``.

        Returns:
            A scalar, or ``(B,)`` for ``"none"``.

        Raises:
            ArgumentError: the reduction is unknown.
        """
        return _reduced(self.log_likelihood(emissions, tags), reduction)

    if TYPE_CHECKING:

        def __call__(  # noqa: D102
            self, emissions: Ragged, tags: Ragged, reduction: LabelReduction = "sum"
        ) -> Tensor: ...

    def loss(self, emissions: Ragged, tags: Ragged, reduction: LabelReduction = "mean") -> Tensor:
        """Return the negative log-likelihood of the tags.

        Args:
            emissions: as for all methods.
            tags: as for all methods.
            reduction: ``"mean"`` or ``"sum"`` over the sequences, or ``"none"``. Without sequences
                the mean is 0. For a mean over elements divide the sum by ``tags.numel()``.

        Returns:
            A scalar, or ``(B,)`` for ``"none"``.

        Raises:
            ArgumentError: the reduction is unknown.

        Example:
            >>> CRF(4).loss(Ragged([torch.zeros(2, 4)]), Ragged([[3, 1]])).exp().round().item()
            16.0
        """
        return _reduced(-self.log_likelihood(emissions, tags), reduction)

    def score(self, emissions: Ragged, tags: Ragged) -> Tensor:
        """Return the score of the tags of each sequence, ``(B,)``; 0 for an empty sequence.

        Minus :meth:`log_partition` it is the log-likelihood.

        Example:
            >>> CRF(2).score(Ragged([torch.tensor([[0., 1.], [3., 2.]])]), Ragged([[1, 0]])).tolist()
            [4.0]
        """
        scores = self._scores(emissions)
        path = recursions.path_score(scores, self._path(emissions, tags), emissions.offsets)
        return path.to(scores.end.dtype)

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
        log_z: Tensor = _chains().log_partition(scores, emissions.lengths_cpu, emissions.offsets)
        return (path - log_z).to(scores.end.dtype)

    def log_partition(self, emissions: Ragged) -> Tensor:
        """Return log Z, ``(B,)``, the log-sum over all paths; 0 for an empty sequence.

        Example:
            >>> CRF(4).log_partition(Ragged([torch.zeros(2, 4), torch.zeros(0, 4)])).exp().tolist()
            [16.0, 1.0]
        """
        scores = self._scores(emissions)
        log_z: Tensor = _chains().log_partition(scores, emissions.lengths_cpu, emissions.offsets)
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
            _chains().marginals(scores, emissions.lengths_cpu, emissions.offsets)
        )

    def decode(self, emissions: Ragged) -> Ragged:
        """Return the best tags of each sequence, computed with Viterbi's algorithm.

        Ties go to the path with the lowest last tag, then the lowest last but one, and so on.

        Returns:
            The tags, ``(N,)`` int64; those of an empty sequence are empty. :meth:`score` has their
            scores.

        Example:
            >>> CRF(2).decode(Ragged([torch.tensor([[0., 1.], [3., 2.]])])).tolist()
            [[1, 0]]
        """
        scores = self._scores(emissions)
        return emissions._like(
            _chains().best_tags(scores, emissions.lengths_cpu, emissions.offsets)
        )

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
            *(
                scores.to(dtype)
                for scores in (
                    values,
                    self.start_transitions,
                    self.transitions,
                    self.end_transitions,
                )
            )
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


def _reduced(each: Tensor, reduction: LabelReduction) -> Tensor:
    """Reduce the numbers of the sequences, ``(B,)``."""
    check_label_reduction(reduction)
    if reduction == "none":
        return each
    if reduction == "sum":
        return each.sum()
    # A mean would be NaN for no sequences.
    return each.sum() / torch.ones_like(each).sum().clamp(min=1)


def _chains() -> Any:
    """Return the module of the recursions: operators, or loops within an exported graph."""
    return loops if has_loops() else recursions
