"""The conditional random field compared with the sum over all paths."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from raglane import Ragged
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError
from raglane.nn.crf import CRF, recursions
from strategies import sequences_of

TAGS = 3


def random_crf(tags: int = TAGS, dtype: torch.dtype = torch.float64) -> CRF:
    crf = CRF(tags, dtype=dtype)
    with torch.no_grad():
        for parameter in crf.parameters():
            parameter.normal_()
    return crf


def random_batch(lengths: list[int], tags: int = TAGS) -> tuple[Ragged, Ragged]:
    emissions = Ragged.from_flat(
        torch.randn(sum(lengths), tags, dtype=torch.float64), lengths=lengths
    )
    return emissions, emissions._like(torch.randint(0, tags, (sum(lengths),)))


def all_paths(crf: CRF, emissions: Tensor) -> tuple[list[tuple[int, ...]], Tensor]:
    """Return every path through one sequence, and the score of each."""
    paths = list(itertools.product(range(crf.num_tags), repeat=emissions.shape[0]))
    scores = []
    for path in paths:
        score = emissions.new_zeros(())
        for step, tag in enumerate(path):
            score = score + emissions[step, tag]
            score = score + (
                crf.start_transitions[tag] if step == 0 else crf.transitions[path[step - 1], tag]
            )
        scores.append(score + crf.end_transitions[path[-1]] if path else score)
    return paths, torch.stack(scores)


def by_hand(crf: CRF, emissions: Ragged, tags: Ragged) -> dict[str, Tensor]:
    """Compute the results of the methods from the list of all paths."""
    names = ("log_partition", "log_likelihood", "marginals", "tags", "score")
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for sequence, own in zip(emissions, tags, strict=True):
        paths, scores = all_paths(crf, sequence)
        found["log_partition"].append(scores.logsumexp(0))
        found["log_likelihood"].append(scores.log_softmax(0)[paths.index(tuple(own.tolist()))])
        best = int(scores.argmax())
        found["score"].append(scores[best])
        found["tags"].append(torch.tensor(paths[best], dtype=torch.int64))
        shares = scores.softmax(0)
        through = torch.tensor(paths, dtype=torch.int64).view(len(paths), len(own))
        ways = torch.nn.functional.one_hot(through, crf.num_tags).to(shares.dtype)
        found["marginals"].append(torch.einsum("p,plc->lc", shares, ways))
    empty = {
        "marginals": torch.zeros(0, crf.num_tags, dtype=torch.float64),
        "tags": torch.zeros(0, dtype=torch.int64),
    }
    nothing = torch.zeros(0, dtype=torch.float64)
    return {
        name: torch.cat([empty[name], *parts])
        if name in empty
        else torch.stack(parts)
        if parts
        else nothing
        for name, parts in found.items()
    }


def ours(crf: CRF, emissions: Ragged, tags: Ragged) -> dict[str, Tensor]:
    best = crf.decode(emissions)
    return {
        "log_partition": crf.log_partition(emissions),
        "log_likelihood": crf.log_likelihood(emissions, tags),
        "marginals": crf.marginals(emissions).values,
        "tags": best.values,
        "score": crf.score(emissions, best),
    }


def close(name: str, own: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        own, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{name}: {text}"
    )


LENGTHS = [[3, 0, 1, 4], [1], [0], [0, 0], [], [4, 4], [2, 4, 1, 1, 0, 3]]
FORBIDDEN = -float("inf")


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("tags", "forbid"), [(1, False), (TAGS, False), (TAGS, True)])
def test_equals_the_sum_over_all_paths(lengths: list[int], tags: int, forbid: bool) -> None:
    crf = random_crf(tags)
    emissions, gold = random_batch(lengths, tags)
    if forbid:
        gold = emissions._like(torch.zeros_like(gold.values))
        with torch.no_grad():
            crf.transitions[1, 2] = crf.start_transitions[1] = crf.end_transitions[2] = FORBIDDEN
    emissions.values.requires_grad_()
    own, expected = ours(crf, emissions, gold), by_hand(crf, emissions, gold)
    inputs = [emissions.values, *crf.parameters()]
    for name, value in own.items():
        close(name, value, expected[name])
        if name == "tags" or not sum(lengths):
            continue
        weights = torch.randn_like(value)
        pairs = [
            torch.autograd.grad(
                (result[name] * weights).sum(), inputs, retain_graph=True, allow_unused=True
            )
            for result in (own, expected)
        ]
        for parameter, mine, theirs in zip(inputs, *pairs, strict=True):
            theirs = torch.zeros_like(parameter) if theirs is None else theirs
            close(name, mine, theirs)


METHODS: dict[str, Callable[[CRF, Ragged, Ragged], Tensor]] = {
    "log_likelihood": lambda crf, emissions, tags: crf.log_likelihood(emissions, tags),
    "log_partition": lambda crf, emissions, _: crf.log_partition(emissions),
    "marginals": lambda crf, emissions, _: crf.marginals(emissions).values,
}


@pytest.mark.parametrize(
    ("method", "forbid"),
    [
        ("log_likelihood", False),
        ("log_likelihood", True),
        ("log_partition", False),
        ("marginals", True),
    ],
)
def test_gradients_and_second_gradients(method: str, forbid: bool) -> None:
    """By finite differences, also with forbidden tags and transitions."""
    crf = random_crf()
    emissions, tags = random_batch([2, 0, 1])
    start, transitions, end = (
        part.detach().clone()
        for part in (crf.start_transitions, crf.transitions, crf.end_transitions)
    )
    parts = [emissions.values.clone(), transitions, start, end]
    free = [torch.ones_like(part, dtype=torch.bool) for part in parts]
    if forbid:
        tags = emissions._like(torch.zeros_like(tags.values))
        free[0][2, 2] = free[1][1, 2] = free[1][2, 2] = free[2][1] = free[3][1] = False
        # All transitions to tag 2 are forbidden.
        free[1][0, 2] = False

    def run(*numbers: Tensor) -> Tensor:
        filled = [
            torch.where(mask, number, torch.tensor(FORBIDDEN, dtype=torch.float64))
            for mask, number in zip(free, numbers, strict=True)
        ]
        named = dict(
            zip(
                ("crf.transitions", "crf.start_transitions", "crf.end_transitions"),
                filled[1:],
                strict=True,
            )
        )
        return torch.func.functional_call(
            _Call(crf, METHODS[method]), named, (emissions._like(filled[0]), tags)
        )

    inputs = tuple(part.requires_grad_() for part in parts)
    assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True)
    torch.testing.assert_close(torch.func.jacfwd(run)(*inputs), torch.func.jacrev(run)(*inputs))
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


class _Call(torch.nn.Module):
    """A module that calls a method of its CRF."""

    def __init__(self, crf: CRF, method: Callable[[CRF, Ragged, Ragged], Tensor]) -> None:
        super().__init__()
        self.crf, self.method = crf, method

    def forward(self, emissions: Ragged, tags: Ragged) -> Tensor:
        return self.method(self.crf, emissions, tags)


def test_a_sequence_without_an_allowed_path_stays_alone() -> None:
    crf = random_crf()
    emissions, tags = random_batch([2, 3])
    emissions.values[0] = FORBIDDEN
    emissions.values.requires_grad_()
    assert crf.log_partition(emissions).isneginf().tolist() == [True, False]
    assert crf.log_likelihood(emissions, tags).isnan().tolist() == [True, False]
    best = crf.decode(emissions)
    assert crf.score(emissions, best).isneginf().tolist() == [True, False]
    crf.log_partition(emissions)[1].backward()
    for leaf in (emissions.values, *crf.parameters()):
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
    assert crf.marginals(emissions)[0].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    crf = random_crf(7, dtype)
    lengths = [5, 0, 9, 1, 33, 9, 2, 5]
    emissions = Ragged(sequences_of(lengths, (7,), dtype))
    tags = emissions._like(torch.randint(0, 7, (sum(lengths),)))
    emissions.values.requires_grad_()
    whole = ours(crf, emissions, tags)
    (grad,) = torch.autograd.grad(whole["log_likelihood"].sum(), emissions.values)
    for number in range(len(lengths)):
        alone = emissions[number : number + 1]
        values = alone.values.detach().requires_grad_()
        alone = alone._like(values)
        single = ours(crf, alone, tags[number : number + 1])
        for name in ("log_partition", "log_likelihood", "score"):
            _same(single[name], whole[name][number : number + 1])
        for name in ("marginals", "tags"):
            _same(single[name], emissions._like(whole[name])[number])
        _same(
            torch.autograd.grad(single["log_likelihood"].sum(), values)[0],
            emissions._like(grad)[number],
        )


def _same(own: Tensor, expected: Tensor) -> None:
    """Compare bits on a CPU; a GPU has another order of sums."""
    rtol, atol = (0.0, 0.0) if own.is_cpu else (None, None)
    torch.testing.assert_close(own, expected, rtol=rtol, atol=atol)


def test_a_nan_stays_in_its_sequence() -> None:
    crf = random_crf()
    emissions, tags = random_batch([3, 2, 0, 4, 1])
    clean = ours(crf, emissions, tags)
    (clean_grad,) = torch.autograd.grad(
        crf.log_likelihood(emissions._like(emissions.values.requires_grad_()), tags).sum(),
        emissions.values,
    )
    values = emissions.values.detach().clone()
    values[3] = torch.nan  # in sequence 1
    values.requires_grad_()
    spoilt = emissions._like(values)
    found = ours(crf, spoilt, tags)
    others = torch.tensor([0, 2, 3, 4])
    for name in ("log_partition", "log_likelihood", "score"):
        assert found[name][1].isnan()
        _same(found[name][others], clean[name][others])
    (grad,) = torch.autograd.grad(crf.log_likelihood(spoilt, tags).sum(), values)
    for name, own, expected in (
        ("marginals", found["marginals"], clean["marginals"]),
        ("tags", found["tags"], clean["tags"]),
        ("gradient", grad, clean_grad),
    ):
        mine, theirs = emissions._like(own)[others], emissions._like(expected)[others]
        assert torch.equal(mine.values, theirs.values), name


def test_long_sequences() -> None:
    """In float32, compared with scaled products of matrices in float64."""
    crf, length = random_crf(4), 2000
    emissions = 3 * torch.randn(length, 4, dtype=torch.float64)
    tags = Ragged([torch.randint(0, 4, (length,)), torch.zeros(1, dtype=torch.int64)])
    weight, log_z = crf.start_transitions.detach().exp(), 0.0
    for step, emission in enumerate(emissions):
        weight = (weight @ crf.transitions.detach().exp() if step else weight) * emission.exp()
        log_z += float(weight.sum().log())
        weight = weight / weight.sum()
    log_z += float((weight * crf.end_transitions.detach().exp()).sum().log())

    scores = recursions.Scores(
        emissions,
        *(part.detach() for part in (crf.start_transitions, crf.transitions, crf.end_transitions)),
    )
    path = float(recursions.path_score(scores, tags[0], tags[:1].offsets))
    single = crf.float()
    rounded = Ragged([emissions.float(), emissions[:1].float()])
    assert float(single.log_likelihood(rounded, tags)[0].detach()) == pytest.approx(
        path - log_z, rel=1e-5
    )
    marginals = single.marginals(rounded).values.detach()
    torch.testing.assert_close(marginals.sum(1), torch.ones(length + 1))
    # Marginals near one end do not depend on the other.
    near = single.marginals(Ragged([rounded[0][:100], rounded[0][-100:]])).values.detach()
    torch.testing.assert_close(marginals[:50], near[:50])
    torch.testing.assert_close(marginals[length - 50 : length], near[-50:])


def test_ties_go_to_the_lowest_tag_from_the_end() -> None:
    crf = CRF(3)
    emissions = Ragged([torch.zeros(4, 3), torch.ones(2, 3)])
    tags = crf.decode(emissions)
    assert not tags.values.any()
    assert crf.score(emissions, tags).tolist() == [0.0, 2.0]
    # 0 1 and 1 0 are equally good: the last tag decides.
    with torch.no_grad():
        crf.transitions.fill_(FORBIDDEN)
        crf.transitions[0, 1] = crf.transitions[1, 0] = 0
    assert crf.decode(Ragged([torch.zeros(2, 3)])).tolist() == [[1, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype, device: torch.device) -> None:
    """Also under autocast."""
    crf = random_crf(5, dtype)
    emissions = Ragged([torch.randn(6, 5).to(dtype), torch.randn(2, 5).to(dtype)])
    tags = emissions._like(torch.randint(0, 5, (8,)))
    values: Any = emissions.values.requires_grad_()
    with torch.no_grad():
        wide = CRF(5, dtype=torch.float32)
        for name, parameter in wide.named_parameters():
            parameter.copy_(getattr(crf, name))
        expected = ours(wide, emissions.to(torch.float32), tags)
    with torch.autocast(device.type, torch.bfloat16):
        cast = ours(wide, emissions.to(torch.float32), tags)
    for results in (ours(crf, emissions, tags), cast):
        for name, value in results.items():
            assert value.dtype in (torch.float32, torch.int64)
            torch.testing.assert_close(value, expected[name], rtol=0.0, atol=0.0)
    assert random_crf(5).log_partition(emissions).dtype is torch.float64
    crf.loss(emissions, tags).backward()
    assert values.grad.dtype is dtype


@pytest.mark.parametrize("lengths", LENGTHS)
def test_reductions(lengths: list[int]) -> None:
    crf = random_crf()
    emissions, tags = random_batch(lengths)
    each = -crf.log_likelihood(emissions, tags)
    assert torch.equal(crf.loss(emissions, tags, reduction="none"), each)
    torch.testing.assert_close(crf.loss(emissions, tags), each.sum() / max(len(lengths), 1))
    torch.testing.assert_close(crf.loss(emissions, tags, reduction="sum"), each.sum())
    # The idiom of pytorch-crf.
    torch.testing.assert_close(-crf(emissions, tags), each.sum())
    for reduction in ("mean", "none"):
        torch.testing.assert_close(
            -crf(emissions, tags, reduction=reduction),
            crf.loss(emissions, tags, reduction=reduction),
        )
    crf.loss(emissions, tags).backward()
    for parameter in crf.parameters():
        assert parameter.grad is not None
        assert sum(lengths) or not parameter.grad.any()


def test_names_of_parameters_are_those_of_pytorch_crf() -> None:
    shapes = {name: tuple(value.shape) for name, value in CRF(TAGS).state_dict().items()}
    sizes = {"start_transitions": (TAGS,), "end_transitions": (TAGS,), "transitions": (TAGS, TAGS)}
    assert shapes == sizes


def test_compiled_once_for_all_lengths() -> None:
    crf = random_crf()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")

    def run(emissions: Ragged, tags: Ragged) -> tuple[Tensor, ...]:
        best = crf.decode(emissions)
        return (
            crf.loss(emissions, tags),
            best.values,
            crf.score(emissions, best).detach(),
            crf.marginals(emissions.detach()).values.detach(),
        )

    compiled = torch.compile(run, backend=counter, fullgraph=True, dynamic=True)
    graphs = 0
    for lengths in ([3, 2, 2, 4, 1], [2, 0, 3, 5, 1, 7, 8]):
        emissions, tags = random_batch(lengths)
        emissions.values.requires_grad_()
        found = []
        for function in (compiled, run):
            loss, *rest = function(emissions, tags)
            found.append(
                [loss, *rest, *torch.autograd.grad(loss, [emissions.values, *crf.parameters()])]
            )
        torch.testing.assert_close(*found)
        graphs = graphs or counter.frame_count
        assert counter.frame_count == graphs


EMISSIONS, GOLD = Ragged([[[0.0] * TAGS] * 2, [[0.0] * TAGS]]), Ragged([[0, 1], [2]])


@pytest.mark.parametrize(
    ("emissions", "tags", "kind", "says"),
    [
        (EMISSIONS.values, GOLD, ArgumentTypeError, "emissions must be .*got a Tensor"),
        (GOLD + 0.5, GOLD, ShapeError, "each of the 3 tags"),
        (EMISSIONS.map(lambda values: values.long()), GOLD, ArgumentTypeError, "floating-point"),
        (EMISSIONS, GOLD.to(torch.float32), ArgumentTypeError, "tags must be .*got torch.float32"),
        (
            EMISSIONS,
            GOLD.map(lambda values: values.unsqueeze(1)),
            ShapeError,
            "tags must be .*got elements of shape",
        ),
        (EMISSIONS, Ragged([[0, 1]]), ShapeError, "tags must be .*got 1 sequences"),
        (EMISSIONS, GOLD + 1, ArgumentError, "values from 1 to 3"),
    ],
)
def test_mistakes(
    device: torch.device, emissions: Any, tags: Any, kind: type[RaglaneError], says: str
) -> None:
    if kind is ArgumentError and device.type != "cpu":
        pytest.skip("a GPU's kernel checks tags itself")
    batches = [batch.to(device) for batch in (emissions, tags)]
    with pytest.raises(kind, match=says):
        CRF(TAGS)(*batches)


def test_mistakes_of_other_arguments() -> None:
    with pytest.raises(ArgumentError, match="num_tags"):
        CRF(0)
    with pytest.raises(ArgumentError, match="reduction must be one of mean, sum, none"):
        CRF(TAGS).loss(*random_batch([1]), reduction="token_mean")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="on meta, like the other tensors"):
        CRF(TAGS, device="meta").decode(EMISSIONS)
