"""Every module of torch.nn with a Ragged is right, or raises one line that says why not."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl

LENGTHS, SIZE = [3, 1, 4], 4

# The arguments of modules that need some.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "AdaptiveLogSoftmaxWithLoss": (SIZE, 8, [3]),
    "Bilinear": (SIZE, SIZE, 2),
    "ChannelShuffle": (2,),
    "ConstantPad1d": (1, 0.5),
    "ConstantPad2d": (1, 0.5),
    "ConstantPad3d": (1, 0.5),
    "CrossMapLRN2d": (2,),
    "Embedding": (9, 3),
    "EmbeddingBag": (9, 3),
    "Flatten": (2,),
    "Fold": (2, 2),
    "GroupNorm": (2, SIZE),
    "LayerNorm": (SIZE,),
    "Linear": (SIZE, 3),
    "LazyLinear": (3,),
    "LinearCrossEntropyLoss": (SIZE, 3),
    "LocalResponseNorm": (2,),
    "LogSoftmax": (1,),
    "MultiheadAttention": (SIZE, 2),
    "RMSNorm": (SIZE,),
    "Softmax": (1,),
    "Softmin": (-1,),
    "Threshold": (0.5, 0.1),
    "TransformerDecoderLayer": (SIZE, 2, 8),
    "TransformerEncoderLayer": (SIZE, 2, 8),
    "Unflatten": (-1, (2, 2)),
}
# Kinds of names, and their arguments.
KINDS: dict[str, tuple[Any, ...]] = {
    "LPPool": (2, 2),
    "LazyConv": (3, 1),
    "Conv": (SIZE, 3, 1),
    "Adaptive": (2,),
    "Fractional": (2, 1),
    "Pool": (2,),
    "Unpool": (2,),
    "Pad": (1,),
    "InstanceNorm": (SIZE,),
    "BatchNorm": (SIZE,),
    "Pixel": (2,),
    "Unfold": (2,),
    "GRU": (SIZE, 3),
    "LSTM": (SIZE, 3),
    "RNN": (SIZE, 3),
}
# Without a call, or containers of other modules.
OMITTED = """Container Module ModuleDict ModuleList ParameterDict ParameterList DataParallel RNNBase RNNCellBase
TransformerDecoder TransformerEncoder""".split()
REFUSED = """CTCLoss ChannelShuffle EmbeddingBag Fold GroupNorm LocalResponseNorm MultiheadAttention SyncBatchNorm
TransformerDecoderLayer TransformerEncoderLayer Transformer LinearCrossEntropyLoss Softmax2d Upsample
UpsamplingBilinear2d UpsamplingNearest2d TripletMarginWithDistanceLoss PixelShuffle PixelUnshuffle Unfold
BatchNorm1d InstanceNorm1d InstanceNorm2d LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d LazyInstanceNorm1d
LazyInstanceNorm2d LazyInstanceNorm3d GRU LSTM RNN CircularPad2d ConstantPad3d ReflectionPad2d ReflectionPad3d
ReplicationPad2d ReplicationPad3d ZeroPad3d""".split()
REFUSED_KINDS = ("Conv", "Pool", "Unpool")
# The check of dimensions of torch comes first.
DIMENSIONS = re.compile(r"(?i)expected.* input|multi-target not supported")
NAMES = sorted(
    name
    for name, kind in vars(nn).items()
    if inspect.isclass(kind) and issubclass(kind, nn.Module) and name not in OMITTED
)


def module_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind = getattr(nn, name)
    if name in ARGUMENTS:
        return kind(*ARGUMENTS[name])
    if (name.startswith("Lazy") and "Norm" in name) or name.startswith(("Upsampl",)):
        return kind() if "Norm" in name else kind(scale_factor=2)
    for part, arguments in KINDS.items():
        if part in name:
            return kind(*arguments)
    return kind()


def inputs_of(name: str, module: nn.Module) -> list[Tensor]:
    """Return flat values of as many batches as the module reads."""
    rows = sum(LENGTHS)
    draw = [torch.rand(rows, SIZE) * 0.8 + 0.1 for _ in range(3)]
    if name.startswith("Embedding"):
        return [torch.randint(9, (rows,))]
    classes = torch.randint(SIZE, (rows,))
    if name in ("CrossEntropyLoss", "NLLLoss", "NLLLoss2d", "MultiMarginLoss"):
        return [draw[0].log(), classes]
    if name in ("AdaptiveLogSoftmaxWithLoss", "LinearCrossEntropyLoss"):
        return [draw[0], classes % 3]
    if name == "CosineEmbeddingLoss":
        return [draw[0], draw[1], torch.ones(rows)]
    if name == "MultiLabelMarginLoss":
        return [draw[0], torch.randint(SIZE, (rows, SIZE))]
    if name == "MultiLabelSoftMarginLoss":
        return [draw[0], draw[1].round()]
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [each for each in parameters if each.default is each.empty]
    return draw[: max(1, len(needed))] if len(needed) < 4 else [*draw, draw[0]]


def alone(module: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Return the results of the module for each sequence alone, without the batch."""
    pieces = zip(*(each.split(LENGTHS) for each in inputs), strict=True)
    return [module(*(piece[None] for piece in rows))[0] for rows in pieces]


@pytest.mark.parametrize("name", NAMES)
def test_modules(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = module_of(name).eval()
        inputs = inputs_of(name, module)
        batches = [rl.Ragged.from_flat(each, lengths=LENGTHS) for each in inputs]
        try:
            result = module(*batches)
        except Exception as error:
            check_refusal(name, error)
            return
        assert name not in REFUSED
        assert not any(kind in name for kind in REFUSED_KINDS)
        if "Loss" in name:
            expected = module(*inputs)
        elif isinstance(result, rl.Ragged):
            expected = torch.cat(alone(module, inputs))
            result = result.values
        else:
            expected = torch.stack(alone(module, inputs))
    torch.testing.assert_close(result, expected)


def check_refusal(name: str, error: Exception) -> None:
    """Check that the message is one line, with a reason and a replacement if it is ours."""
    text = str(error)
    assert "\n" not in text
    if DIMENSIONS.search(text) and not name.startswith("Lazy"):
        return
    assert isinstance(error, rl.errors.RaglaneError | AttributeError), error
    assert re.fullmatch(r".+\. [A-Z].+\.", text)
    assert name in REFUSED or any(kind in name for kind in REFUSED_KINDS), error


@pytest.mark.parametrize("name", ["Dropout1d", "FeatureAlphaDropout"])
def test_dropout_of_channels_zeroes_whole_steps(name: str) -> None:
    batch = rl.Ragged.from_flat(torch.ones(400, 3), lengths=[399, 0, 1])
    rows = getattr(nn, name)(0.5)(batch).values
    assert torch.equal(rows, rows[:, :1].expand(400, 3))
    assert 0.3 < float((rows[:, 0] == rows[:, 0].max()).float().mean()) < 0.7


def test_several_weights_of_prelu_are_no_steps() -> None:
    batch = rl.Ragged.from_flat(-torch.ones(8, SIZE), lengths=LENGTHS)
    module = nn.PReLU(SIZE)
    with pytest.raises(rl.errors.ArgumentTypeError, match=r"steps of a Ragged, got 4.*r\.map"):
        module(batch)
    assert torch.equal(batch.map(module).values, module(batch.values))


def test_a_lazy_module_learns_its_channels_from_rows() -> None:
    """Refused without a change: it counts dimension 1, of which steps have no number."""
    batch = rl.Ragged.from_flat(torch.randn(8, SIZE), lengths=LENGTHS)
    module = nn.LazyBatchNorm1d()
    with pytest.raises(rl.errors.ArgumentTypeError, match=r"LazyBatchNorm1d.*steps.*r\.map"):
        module(batch)
    assert batch.map(module).shape == batch.shape
    assert module.num_features == SIZE
    assert nn.LazyLinear(3)(batch).shape == (3, None, 3)
