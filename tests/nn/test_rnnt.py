"""The transducer's loss compared with the sum over all alignments, and with a padded batch in plain
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.kernels.cpu import transduction as kernels
from raglane.nn.transduction import fused, lattice
from raglane.transduction import rnnt_loss
from tensor_sizes import largest_tensor

H, C = 5, 4
INFINITE = float("inf")
# Frames and labels of each sequence: none of either, more labels than frames, and long ones among
# short ones.
PAIRS = [(7, 3), (0, 0), (1, 0), (0, 2), (3, 5), (20, 9), (1, 1), (12, 0)]


class Case:
    """Random frames, states, targets and weights of a linear joint."""

    def __init__(
        self, pairs: list[tuple[int, int]], *, classes: int = C, size: int = H, blank: int = 0
    ) -> None:
        self.pairs, self.blank = pairs, blank
        self.frames, self.labels = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        options: Any = {"dtype": torch.float64, "requires_grad": True}
        self.encoder = torch.randn(sum(self.frames), size, **options)
        self.predictor = torch.randn(sum(self.labels) + len(pairs), size, **options)
        self.joint = torch.nn.Linear(size, classes, dtype=torch.float64)
        target = torch.randint(0, classes - 1, (sum(self.labels),))
        self.targets = rl.Ragged.from_flat(target + (target >= blank), lengths=self.labels)

    @property
    def inputs(self) -> list[Tensor]:
        return [self.encoder, self.predictor, *self.joint.parameters()]

    def logits(self) -> list[Tensor]:
        """Logits ``(T, U + 1, C)`` of each sequence."""
        states = self.predictor.split([labels + 1 for labels in self.labels])
        frames = self.encoder.split(self.frames)
        return [
            self.joint((e[:, None] + p[None]).tanh()) for e, p in zip(frames, states, strict=True)
        ]

    def loss(self, way: str, dtype: torch.dtype = torch.float64, **options: Any) -> Tensor:
        """The loss with a linear joint, with a function, or from logits."""
        options = {"reduction": "none", "blank": self.blank, **options}
        encoder = rl.Ragged.from_flat(self.encoder.to(dtype), lengths=self.frames)
        predictor = rl.Ragged.from_flat(
            self.predictor.to(dtype), lengths=[labels + 1 for labels in self.labels]
        )
        joint = self.joint
        if dtype is not torch.float64:
            joint = torch.nn.Linear(H, C).to(dtype)
            joint.load_state_dict(self.joint.state_dict())
        self.parameters = list(joint.parameters())
        if way == "linear":
            return rnnt_loss(encoder, predictor, self.targets, joint, **options)
        if way == "function":
            return rnnt_loss(
                encoder, predictor, self.targets, lambda a, b: joint((a + b).tanh()), **options
            )
        logits = [part.reshape(-1, part.shape[-1]).to(dtype) for part in self.logits()]
        none = self.joint(self.encoder[:0]).to(dtype)
        rows = rl.Ragged.from_flat(
            torch.cat([none, *logits]), lengths=[len(part) for part in logits]
        )
        self.parameters = list(self.joint.parameters())
        return rnnt_loss(rows, None, self.targets, **options)

    def expected(self, whole: Callable[..., Tensor], **options: Any) -> Tensor:
        """Losses by a function of the log-probabilities and labels of one sequence."""
        pairs = zip(self.logits(), self.targets, strict=True)
        return torch.stack(
            [
                whole(part.log_softmax(-1), labels.tolist(), self.blank, **options)
                for part, labels in pairs
            ]
        )


def by_enumeration(
    scores: Tensor,
    labels: list[int],
    blank: int,
    one_per_frame: bool = False,
    fastemit: float = 0.0,
) -> Tensor:
    """Minus the logarithm of the sum over all alignments, each a list of emissions."""
    frames, paths = scores.shape[0], []

    def extend(t: int, u: int, path: list[Tensor]) -> None:
        if t == frames:
            if u == len(labels):
                paths.append(sum(path, scores.new_zeros(())))
            return
        extend(t + 1, u, [*path, scores[t, u, blank]])
        if u < len(labels):
            label = scores[t, u, labels[u]]
            label = label + fastemit * (label - label.detach())
            extend(t + one_per_frame, u + 1, [*path, label])

    extend(0, 0, [])
    return -torch.stack(paths).logsumexp(0) if paths else scores.sum() * 0 + INFINITE


def by_recursion(
    scores: Tensor, labels: list[int], blank: int, one_per_frame: bool = False
) -> Tensor:
    """The same by dynamic programming, node after node."""
    never = scores.new_tensor(-INFINITE)
    nodes: dict[tuple[int, int], Tensor] = {(0, 0): scores.new_zeros(())}
    frames, back = scores.shape[0], int(one_per_frame)
    for t in range(frames + 1):
        for u in range(len(labels) + 1):
            ways = []
            if t > 0:
                ways.append(nodes.get((t - 1, u), never) + scores[t - 1, u, blank])
            if u > 0 and 0 <= t - back < frames:
                ways.append(
                    nodes.get((t - back, u - 1), never) + scores[t - back, u - 1, labels[u - 1]]
                )
            ways = [way for way in ways if way != never]
            if ways:
                nodes[t, u] = torch.stack(ways).logsumexp(0)
    return -nodes.get((frames, len(labels)), scores.sum() * 0 - INFINITE)


def compare(own: Tensor, expected: Tensor, case: Case, exact: float) -> None:
    """Values, and gradients of a random weighting of the finite losses, of which the largest number
    counts as 1.
    """
    torch.testing.assert_close(own.double(), expected, rtol=exact, atol=exact)
    upstream = torch.randn_like(expected).masked_fill(expected == INFINITE, 0)
    kinds: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    ours = torch.autograd.grad(
        own, [case.encoder, case.predictor, *case.parameters], upstream.to(own.dtype), **kinds
    )
    finite = expected.masked_fill(expected == INFINITE, 0)
    for part, other in zip(
        ours, torch.autograd.grad(finite, case.inputs, upstream, **kinds), strict=True
    ):
        largest = other.abs().max().clamp(min=1)
        torch.testing.assert_close(part.double() / largest, other / largest, rtol=exact, atol=exact)


WAYS = pytest.mark.parametrize("way", ["linear", "function", "logits"])
MONOTONIC = pytest.mark.parametrize("one_per_frame", [False, True])


@WAYS
@MONOTONIC
@pytest.mark.parametrize("fastemit", [0.0, 0.3])
def test_against_every_alignment(way: str, one_per_frame: bool, fastemit: float) -> None:
    case = Case([(frames, labels) for frames in range(4) for labels in range(4)], blank=2)
    own = case.loss(way, one_symbol_per_frame=one_per_frame, fastemit=fastemit)
    compare(
        own,
        case.expected(by_enumeration, one_per_frame=one_per_frame, fastemit=fastemit),
        case,
        1e-12,
    )


@WAYS
@MONOTONIC
def test_against_a_recursion(way: str, one_per_frame: bool) -> None:
    case = Case(PAIRS)
    expected = case.expected(by_recursion, one_per_frame=one_per_frame)
    compare(case.loss(way, one_symbol_per_frame=one_per_frame), expected, case, 1e-10)


@WAYS
def test_in_float32(way: str) -> None:
    case = Case([(60, 20), (5, 2), (30, 0)])
    own = case.loss(way, torch.float32)
    assert own.dtype is torch.float32
    compare(own, case.expected(by_recursion), case, 1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", ["", "fixed", "learned"])
@WAYS
def test_reductions(way: str, weighted: str, reduction: str) -> None:
    """As ctc_loss: a mean divides each loss by its labels, at least 1, then by the sequences."""
    case = Case([(7, 3), (0, 0), (4, 0), (5, 2)])
    weights: Any = (
        torch.tensor([1.0, 2.0, 0.5, 0.0], requires_grad=weighted == "learned")
        if weighted
        else None
    )
    shares = torch.ones(4, dtype=torch.float64) if weights is None else weights.double()
    losses = case.expected(by_recursion)
    expected = (losses * shares).sum()
    if reduction == "mean":
        expected = (losses / torch.tensor([3.0, 1, 1, 2]) * shares).sum() / shares.sum()
    own = case.loss(way, reduction=reduction, sample_weight=weights)
    compare(own, expected, case, 1e-10)
    if weighted == "learned":
        torch.testing.assert_close(
            *(torch.autograd.grad(loss, weights)[0][:3] for loss in (own, expected))
        )


@WAYS
@pytest.mark.parametrize("sharp", [1.0, 30.0])
def test_tiles_and_bands_change_only_rounding(
    way: str, sharp: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of few rows, log-probabilities that are computed twice, and rows that no path
    visits.
    """
    case = Case([(40, 8), (18, 16), (9, 2)])
    with torch.no_grad():
        case.encoder *= sharp
        case.joint.weight *= sharp
    expected = case.expected(by_recursion)
    monkeypatch.setattr(rl.nn.transduction.rnnt, "_TILE", 20)
    for rows, kept in ((1, 0), (50, 0), (50, 2**30), (2048, 20_000)):
        monkeypatch.setattr(fused, "_ROWS", rows)
        monkeypatch.setattr(fused, "_STORED", kept)
        compare(case.loss(way), expected, case, 1e-10)


@MONOTONIC
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernel_and_plain_torch(dtype: torch.dtype, one_per_frame: bool) -> None:
    frames, labels = (torch.tensor(column) for column in zip(*PAIRS, strict=True))
    emissions = (
        torch.randn(int((frames * (labels + 1)).sum()), 3, dtype=dtype)
        .log_softmax(-1)[:, :2]
        .contiguous()
    )
    emissions[3] = -INFINITE
    exact: Any = (
        {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-11, "atol": 1e-11}
    )
    own = kernels.align(emissions, frames, labels, one_per_frame, True)
    torch.testing.assert_close(
        own, lattice.align_in_torch(emissions, frames, labels, one_per_frame, True), **exact
    )
    assert torch.equal(kernels.align(emissions, frames, labels, one_per_frame, False)[0], own[0])


@WAYS
def test_without_kernels(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(PAIRS)
    expected = case.loss(way)
    for module in (fused, lattice):
        monkeypatch.setattr(module, "missing_kernels", lambda: "none here")
    compare(case.loss(way), expected, case, 1e-10)


@pytest.mark.parametrize("way", ["linear", "function"])
def test_a_nan_stays_in_its_sequence(way: str) -> None:
    """Also in the gradients; with a weight of 0 it has no effect."""
    case = Case([(4, 2), (5, 3), (3, 1)])
    clean = case.loss(way)
    expected = torch.autograd.grad(clean[0] + clean[2], case.inputs)
    with torch.no_grad():
        case.encoder[4:9] = float("nan")
    poisoned = case.loss(way)
    assert torch.equal(poisoned[[0, 2]], clean[[0, 2]])
    assert poisoned[1].isnan()
    frames, states, *_ = torch.autograd.grad(poisoned.sum(), case.inputs)
    torch.testing.assert_close(
        frames[[0, 1, 2, 3, 9, 10, 11]], expected[0][[0, 1, 2, 3, 9, 10, 11]]
    )
    torch.testing.assert_close(states[[0, 1, 2, 7, 8]], expected[1][[0, 1, 2, 7, 8]])
    assert frames[4:9].isnan().all()
    ignored = case.loss(way, sample_weight=torch.tensor([1.0, 0, 1]), reduction="none").sum()
    torch.testing.assert_close(torch.autograd.grad(ignored, case.inputs), expected)


def test_a_sequence_has_the_same_bits_in_any_batch() -> None:
    case = Case([(40, 12), (33, 7), (9, 0), (61, 20)])
    whole, alone = case.loss("linear"), []
    frames, states = (
        case.encoder.split(case.frames),
        case.predictor.split([n + 1 for n in case.labels]),
    )
    for e, p, labels in zip(frames, states, case.targets, strict=True):
        one = rl.Ragged([e]), rl.Ragged([p]), rl.Ragged([labels])
        alone.append(rnnt_loss(*one, case.joint, reduction="none"))
    assert torch.equal(whole, torch.cat(alone))


@pytest.mark.parametrize("way", ["linear", "function"])
def test_memory_does_not_grow_with_frames_labels_and_classes(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_STORED", 0)
    case = Case([(300, 40)] * 3, classes=64)
    for part in case.inputs:
        part.grad = torch.zeros_like(part)
    assert (
        largest_tensor(lambda: case.loss(way).sum().backward()) <= 4200 * 64
    )  # the numbers of a tile


def test_dropout_in_a_joint_is_drawn_once() -> None:
    """The backward pass computes the joint again with the same numbers."""
    case = Case([(6, 3)])
    dropout = torch.nn.Dropout(0.5)
    torch.manual_seed(3)
    encoder, predictor = rl.Ragged([case.encoder]), rl.Ragged([case.predictor])
    own = rnnt_loss(
        encoder, predictor, case.targets, lambda a, b: case.joint(dropout(a + b)), reduction="none"
    )
    ours = torch.autograd.grad(own.sum(), case.inputs)
    torch.manual_seed(3)
    logits = case.joint(dropout((case.encoder[:, None] + case.predictor[None]).view(-1, H))).view(
        6, 4, C
    )
    expected = by_recursion(logits.log_softmax(-1), case.targets.values.tolist(), 0)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, case.inputs))


@WAYS
@pytest.mark.parametrize("pairs", [[], [(0, 0)], [(0, 0), (0, 0)]])
def test_without_frames(way: str, pairs: list[tuple[int, int]]) -> None:
    case = Case(pairs)
    for reduction in ("mean", "sum", "none"):
        loss = case.loss(way, reduction=reduction).sum()
        assert loss.item() == 0
        for part in torch.autograd.grad(
            loss, case.inputs, allow_unused=True, materialize_grads=True
        ):
            assert not part.any()


def test_weights_of_a_joint_without_gradients() -> None:
    case = Case([(7, 3), (4, 2)])
    expected = torch.autograd.grad(case.loss("linear", reduction="mean"), case.encoder)
    again = torch.utils.checkpoint.checkpoint(
        case.loss, "linear", reduction="mean", use_reentrant=False
    )
    assert torch.equal(torch.autograd.grad(again, case.encoder)[0], expected[0])
    case.joint.requires_grad_(False)
    assert torch.equal(
        torch.autograd.grad(case.loss("linear", reduction="mean"), case.encoder)[0], expected[0]
    )
    assert not torch.no_grad()(case.loss)("linear").requires_grad
    case.joint.register_forward_hook(lambda *given: given[-1] * 2)
    torch.testing.assert_close(case.loss("linear"), case.loss("function"))
    lazy: Any = torch.nn.Module()
    lazy.linear, lazy.forward = (
        torch.nn.LazyLinear(5),
        lambda frame, state: lazy.linear(frame + state),
    )
    rnnt_loss(
        part := rl.Ragged([torch.ones(2, 3)]), part, rl.Ragged([[1]]), lazy, blank=0
    ).backward()


def test_in_bfloat16() -> None:
    case = Case([(7, 3), (4, 2)])
    own = case.loss("linear", torch.bfloat16)
    assert own.dtype is torch.bfloat16
    parts = ((case.encoder, [7, 4]), (case.predictor, [4, 3]))
    one, other = (rl.Ragged.from_flat(part.bfloat16(), lengths=lengths) for part, lengths in parts)
    for loss in (
        own,
        rnnt_loss(one, other, case.targets, case.joint, reduction="none", blank=case.blank),
    ):
        torch.testing.assert_close(loss.double(), case.expected(by_recursion), rtol=0.05, atol=0.05)
    torch.no_grad()(case.joint.weight.zero_)()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


@WAYS
def test_a_second_derivative_raises(way: str) -> None:
    case = Case([(5, 2)])
    for reduction in ("mean", "none"):
        (gradient,) = torch.autograd.grad(
            case.loss(way, reduction=reduction).sum(), case.encoder, create_graph=True
        )
        with pytest.raises(ArgumentError, match="second derivative"):
            gradient.sum().backward()
        case.encoder.requires_grad_(False)
        (gradient,) = torch.autograd.grad(
            case.loss(way, reduction=reduction).sum(), case.joint.weight, create_graph=True
        )
        with pytest.raises(ArgumentError, match="second derivative"):
            gradient.sum().backward()
        with forward_ad.dual_level():
            case.encoder = forward_ad.make_dual(case.encoder, case.encoder)
            with pytest.raises(ArgumentError, match="encoder must be a plain tensor"):
                case.loss(way, reduction=reduction)
        case.encoder.requires_grad_()


def test_compiled() -> None:
    """torch.compile breaks the graph at the loss."""
    targets, joint = rl.Ragged([[1], [2]]), torch.nn.Linear(H, C)

    def loss(frames: rl.Ragged, states: rl.Ragged) -> Tensor:
        return rnnt_loss(frames * 2, states, targets, joint)

    frames, states = batch(4, 3), batch(2, 2)
    torch.testing.assert_close(
        torch.compile(loss, backend="eager")(frames, states), loss(frames, states)
    )


def batch(*lengths: int, size: int = H) -> rl.Ragged:
    return rl.Ragged.from_flat(torch.randn(sum(lengths), size), lengths=list(lengths))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"targets": rl.Ragged([[1], [4]])},
            ArgumentError,
            "targets must be from 0 to 3, except the blank, 0, got label 4",
        ),
        ({"targets": rl.Ragged([[1], [0]])}, ArgumentError, "targets .* got label 0"),
        ({"targets": rl.Ragged([[1], [-1]])}, ArgumentError, "targets .* got label -1"),
        (
            {"targets": rl.Ragged([[1.0], [2.0]])},
            ArgumentTypeError,
            "targets must be a Ragged of labels",
        ),
        (
            {"targets": rl.Ragged([[1]])},
            ShapeError,
            "targets must be one sequence of labels for each of the 2",
        ),
        (
            {"targets": rl.Ragged([[1], [2, 1]])},
            ShapeError,
            r"predictor must be .*U \+ 1 = 3 for sequence 1, got 2",
        ),
        ({"predictor": batch(2)}, ShapeError, "predictor must be one sequence for each of the 2"),
        (
            {"predictor": None},
            ArgumentTypeError,
            "predictor, joint must be both None or both given",
        ),
        ({"joint": None}, ArgumentTypeError, "predictor, joint must be both None or both given"),
        ({"joint": 3}, ArgumentTypeError, "joint must be a torch.nn.Linear"),
        ({"joint": torch.nn.Linear(H + 1, C)}, ShapeError, "encoder must be of 6 features"),
        ({"predictor": batch(2, 2, size=H + 1)}, ShapeError, "predictor must be of 5 features"),
        (
            {"joint": lambda a, b: (a + b)[:1]},
            ShapeError,
            "joint must be a function that returns logits",
        ),
        (
            {"joint": lambda a, b: (a + b)[:, :2], "targets": rl.Ragged([[1], [3]])},
            ArgumentError,
            "targets must be",
        ),
        (
            {"predictor": None, "joint": None, "encoder": batch(4, 3)},
            ShapeError,
            "encoder must be logits with a mult",
        ),
        ({"encoder": torch.randn(6, H)}, ArgumentTypeError, "encoder must be"),
        (
            {"encoder": rl.Ragged([[1], [2]])},
            ArgumentTypeError,
            "encoder must be of a floating-point dtype",
        ),
        ({"encoder": rl.Ragged([[1.0], [2.0]])}, ShapeError, r"encoder must be values \(N, H\)"),
        ({"blank": 4}, ArgumentError, "blank must be from 0 to 3, one of the classes, got 4"),
        ({"blank": "a"}, ArgumentTypeError, "blank must be a whole number"),
        ({"fastemit": -1}, ArgumentError, "fastemit must be a finite number of at least 0, got -1"),
        (
            {"fastemit": float("nan")},
            ArgumentError,
            "fastemit must be a finite number of at least 0, got nan",
        ),
        (
            {"reduction": "element"},
            ArgumentError,
            "reduction must be one of mean, sum, none",
        ),
        (
            {"sample_weight": torch.tensor([1.0, -1.0])},
            ArgumentError,
            "sample_weight must be finite numbers of at least 0",
        ),
        ({"one_symbol_per_frame": 1}, ArgumentTypeError, "one_symbol_per_frame must be"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], text: str) -> None:
    joint = torch.nn.Linear(H, C)
    good = {
        "encoder": batch(4, 3),
        "predictor": batch(2, 2),
        "targets": rl.Ragged([[1], [2]]),
        "joint": joint,
    }
    assert rnnt_loss(**good).isfinite()  # type: ignore[arg-type]
    with pytest.raises(error, match=text):
        rnnt_loss(**good | change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("frames", "labels", "rows"),
    [([2], [1], 3), ([2], [1], 5), ([-2], [1], 4), ([2**62], [2**40], 4), ([2], [-1], 0)],
)
def test_the_kernel_checks_lengths(frames: list[int], labels: list[int], rows: int) -> None:
    rule = (
        "rows must be the sum of frames"
        if labels == [1] and frames == [2]
        else "must be lengths of at least 0"
    )
    with pytest.raises(ArgumentError, match=rule):
        kernels.align(torch.zeros(rows, 2), torch.tensor(frames), torch.tensor(labels), False, True)


@pytest.mark.parametrize(
    ("emissions", "frames", "rule"),
    [
        (torch.zeros(4, 3), torch.tensor([2]), r"emissions must be of shape \(4, 2\)"),
        (
            torch.zeros(4, 2, dtype=torch.bfloat16),
            torch.tensor([2]),
            "dtype must be RAGLANE_FLOAT32",
        ),
        (
            torch.zeros(4, 2),
            torch.tensor([2], dtype=torch.int32),
            r"frames must be of dtype torch\.int64",
        ),
        (torch.zeros(4, 2), torch.tensor([[2]]), r"frames must be of shape \(1,\)"),
    ],
)
def test_the_kernel_checks_tensors(emissions: Tensor, frames: Tensor, rule: str) -> None:
    with pytest.raises((ArgumentError, ShapeError), match=rule):
        kernels.align(emissions, frames, torch.tensor([1]), False, True)


@pytest.mark.parametrize("is_linear", [True, False])
def test_a_target_without_an_alignment_has_an_infinite_loss_and_no_gradient(
    is_linear: bool,
) -> None:
    """It visits no pair of a frame and a label."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(5, 4)
    with torch.no_grad():
        linear.bias[2] = -torch.inf
    encoder, predictor = torch.randn(6, 5), torch.randn(5, 5)
    inputs = [encoder.requires_grad_(), predictor.requires_grad_(), linear.weight]
    loss = rl.transduction.rnnt_loss(
        rl.Ragged.from_flat(encoder, lengths=[4, 2]),
        rl.Ragged.from_flat(predictor, lengths=[3, 2]),
        rl.Ragged([[1, 2], [3]]),
        linear if is_linear else lambda frames, states: linear(torch.tanh(frames + states)),
        reduction="none",
    )
    assert loss[0] == torch.inf
    assert loss[1].isfinite()
    for gradient in torch.autograd.grad(loss[0], inputs, retain_graph=True):
        assert torch.count_nonzero(gradient) == 0
    for gradient in torch.autograd.grad(loss[1], inputs):
        assert torch.count_nonzero(gradient)
        assert gradient.isfinite().all()
