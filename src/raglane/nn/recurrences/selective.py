"""The selective scan of Mamba."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from raglane._utils.checks import check_flag, check_tensor
from raglane.errors import ShapeError
from raglane.nn.recurrences.arguments import (
    check_elements,
    check_groups,
    check_limits,
    check_parameter,
    check_starts,
    check_state,
    check_values,
    same_dtypes,
)
from raglane.nn.recurrences.recurrence_operator import scan_selectively
from raglane.ragged import Ragged
from raglane.ragged.interop import check_ragged


def selective_scan(
    x: Ragged,
    dt: Ragged,
    A: Tensor,  # noqa: N803
    B: Ragged,  # noqa: N803
    C: Ragged,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    *,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    initial_state: Tensor | None = None,
    resets: Ragged | None = None,
) -> tuple[Ragged, Tensor]:
    """Run the selective state space model of Mamba through each sequence.

    For each of E channels, with a state ``h`` of S numbers that begins with zeros::

        h = exp(dt A) h + dt B x
        y = sum of C h over the states, + D x

    (Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
    algorithm 2 and equation 2a; the factor of ``x`` is ``dt B``, as in their implementation.)
    Sequences of any lengths run without padding, also those of length 0, and never read each other.
    On a CPU, in float32, float64 and bfloat16, a kernel runs forward and backward. It saves the
    states of every 32nd step, and a sequence has the same bits as a whole, in pieces that pass
    their states on, and in any batch. For second derivatives and within the transformations of
    :mod:`torch.func` the steps run in plain torch. On other devices they run in plain torch by
    chunks of 32 steps, side by side, which neither wait for the device nor loop over time, and save
    the states of every step for backward.

    Args:
        x: the input, ``(N, E)``, of a floating-point dtype.
        dt: the step sizes, ``(N, E)``.
        A: ``(E, S)`` real, usually below 0. Parameters have the dtype of ``x``, or float32 for 16 bits.
        B: ``(N, G, S)`` for G groups of consecutive channels, or ``(N, S)`` for one.
        C: as ``B``.
        D: ``(E,)``, or None for zeros.
        dt_bias: ``(E,)``, is added to ``dt``; or None for zeros.
        softplus: True to replace ``dt`` plus its bias by ``log(1 + exp(dt))``.
        dt_limit: the smallest and the largest step size, applied last; or None.
        initial_state: ``(B, E, S)`` for B sequences, in the dtype of ``x``, and float32 for 16 bits;
            or None for zeros.
        resets: bools ``(N,)``: the state is zeros before each element with True.

    Returns:
        The outputs ``(N, E)`` in the dtype of ``x``, and the final states ``(B, E, S)``. Both have
        gradients.

    Raises:
        ArgumentTypeError: an argument is of the wrong kind.
        ShapeError: shapes, lengths, dtypes or devices do not fit together.
        ArgumentError: ``dt_limit`` is not in order.

    Example:
        >>> x = Ragged([torch.randn(5, 4), torch.randn(0, 4), torch.randn(2, 4)])
        >>> dt, B, C = (x.map(lambda values, size=size: torch.randn(7, size)) for size in (4, 3, 3))
        >>> A = -torch.rand(4, 3)
        >>> y, state = selective_scan(x, dt, A, B, C, softplus=True)
        >>> y.lengths.tolist(), state.shape
        ([5, 0, 2], torch.Size([3, 4, 3]))
    """
    values = check_values("x", x, ("channels",))
    channels = values.shape[1]
    steps = check_elements("dt", dt, x, "x", (channels,))
    check_tensor("A", A)
    if A.dim() != 2 or A.shape[0] != channels or A.shape[1] < 1:
        rule = f"(E, S), of E = {channels} channels"
        raise ShapeError("A", f"shape {tuple(A.shape)}", rule, "pass a row for each channel")
    states = A.shape[1]
    parts = {"x": values, "dt": steps}
    for name, batch in (("B", B), ("C", C)):
        parts[name] = _grouped(name, batch, x, states)
    groups = parts["B"].shape[1]
    check_groups("B", groups, "channels", channels)
    if parts["C"].shape[1] != groups:
        got = f"{parts['C'].shape[1]} groups"
        raise ShapeError("C", got, f"{groups} groups, like B", "pass one row per group in both")
    for name, parameter in (("D", D), ("dt_bias", dt_bias)):
        if parameter is not None:
            parts[name] = check_parameter(name, parameter, (channels,), values)
    least, most = check_limits("dt_limit", dt_limit)
    check_flag("softplus", softplus)
    if initial_state is not None:
        shape = (x._count, channels, states)
        initial_state = check_state("initial_state", initial_state, shape, values)
    matrix = check_parameter("A", A, (channels, states), values)
    starts = check_starts(resets, x, "x")
    of_elements = {name: parts[name] for name in ("x", "dt", "B", "C")}
    values, steps, of_b, of_c = same_dtypes(of_elements)
    tensors = (
        *(values, steps, matrix, of_b, of_c),
        *(parts.get("D"), parts.get("dt_bias"), initial_state),
    )
    output, final = scan_selectively(tensors, x.offsets, starts, softplus, least, most)
    return x._like(output), final


def _grouped(name: str, batch: Any, like: Ragged, states: int) -> Tensor:
    """Return B or C with a dimension of groups."""
    check_ragged(name, batch)
    shape = tuple(batch.values.shape[1:])
    features = (shape[0], states) if len(shape) == 2 else (states,)
    values = check_elements(name, batch, like, "A", features)
    return values.unsqueeze(1) if values.dim() == 2 else values
