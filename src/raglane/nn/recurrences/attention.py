"""Linear attention: states that are sums of outer products."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from raglane._utils.checks import check_eps, check_flag, check_number
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.nn.recurrences.arguments import (
    check_decays,
    check_elements,
    check_groups,
    check_parameter,
    check_starts,
    check_state,
    check_values,
    same_dtypes,
)
from raglane.nn.recurrences.recurrence_operator import attend
from raglane.ragged import Ragged
from raglane.ragged.interop import check_ragged

State = Tensor | tuple[Tensor, Tensor, Tensor]


def linear_attention(
    q: Ragged,
    k: Ragged,
    v: Ragged,
    log_decay: Ragged | None = None,
    gain: Ragged | None = None,
    *,
    delta: bool = False,
    log_gain: Ragged | None = None,
    scale: float = 1.0,
    eps: float = 1e-6,
    initial_state: State | None = None,
    resets: Ragged | None = None,
) -> tuple[Ragged, State]:
    """Run linear attention with decays, gains or the delta rule through each sequence.

    For each of H heads, with a state ``S`` of K x V numbers that begins with zeros::

        S = diag(exp(log_decay)) S
        e = v, or with delta v - S^T k
        S = S + gain k e^T
        o = scale S^T q

    This is Mamba-2's state space duality, with ``q = C``, ``k = B``, ``v = x``, ``gain = dt`` and
    ``log_decay = dt A`` (Dao and Gu 2024, "Transformers are SSMs"); retention (Sun et al. 2023,
    "Retentive Network"); gated linear attention, with a decay for each key (Yang et al. 2024, "Gated
    Linear Attention Transformers with Hardware-Efficient Training"); and with ``delta`` DeltaNet
    and Gated DeltaNet (Yang et al. 2025, "Gated Delta Networks", equation 10).

    With ``log_gain`` it is the mLSTM of xLSTM (Beck et al. 2024, "xLSTM: Extended Long Short-Term
    Memory", equations 19 to 27), with a normaliser ``n`` of K numbers and a stabiliser ``m``, which
    begin with zeros::

        m' = max(log_decay + m, log_gain)
        decay = exp(log_decay + m - m'), gain = exp(log_gain - m')
        S = decay S + gain k v^T, n = decay n + gain k
        o = scale S^T q / (max(|scale n^T q|, exp(-m')) + eps)

    Sequences of any lengths run without padding, also those of length 0, and never read each other.
    On a CPU, in float32, float64 and bfloat16, a kernel runs forward and backward. It saves the
    states of every 32nd step, and a sequence has the same bits as a whole, in pieces that pass
    their states on, and in any batch. For second derivatives and within the transformations of
    :mod:`torch.func` the steps run in plain torch. On other devices they run in plain torch by
    chunks of 32 steps, side by side, which neither wait for the device nor loop over time, and save
    the states of every step for backward.

    Args:
        q: queries, ``(N, G, K)``, of a floating-point dtype; each of the G heads serves H / G
            consecutive heads of ``v``.
        k: keys, ``(N, G, K)``.
        v: values, ``(N, H, V)``.
        log_decay: the logarithms of decays, at most 0, which is checked on a CPU: ``(N, H)`` for a
            decay per head, ``(N, H, K)`` per key. ``-inf`` forgets the state. None for no decay.
        gain: ``(N, H)``, the factor of what is written; None for 1.
        delta: True to write the difference of ``v`` and what the state has for ``k``.
        log_gain: ``(N, H)``, mLSTM's input gates as logarithms, in place of ``gain``.
        scale: the factor of the queries, e.g. ``K ** -0.5``.
        eps: is added to mLSTM's divisor, at least 0.
        initial_state: ``(B, H, K, V)`` for B sequences; with ``log_gain`` a tuple of ``S``, ``n``
            ``(B, H, K)`` and ``m`` ``(B, H)``. The dtype is that of ``v``, and float32 for 16 bits.
            None for zeros.
        resets: bools ``(N,)``: all states are zeros before each element with True.

    Returns:
        The outputs ``(N, H, V)`` in the dtype of ``v``, and the final states, in the form of
        ``initial_state``. All have gradients.

    Raises:
        ArgumentTypeError: an argument is of the wrong kind.
        ShapeError: shapes, lengths, dtypes or devices do not fit together.
        ArgumentError: a number is out of its range, or ``log_gain`` is combined with ``gain``,
            ``delta`` or a decay per key.

    Example:
        >>> def drawn(*shape):
        ...     return Ragged.from_flat(torch.randn(7, *shape), lengths=[5, 0, 2])
        >>> q, k, v = drawn(2, 8), drawn(2, 8), drawn(4, 16)
        >>> decays = drawn(4).map(torch.nn.functional.logsigmoid)
        >>> o, state = linear_attention(q, k, v, decays, drawn(4).map(torch.sigmoid), delta=True)
        >>> o.values.shape, state.shape
        (torch.Size([7, 4, 16]), torch.Size([3, 4, 8, 16]))
    """
    values = check_values("v", v, ("heads", "size"))
    heads, width = values.shape[1:]
    queries = check_values("q", q, ("heads", "size"))
    groups, size = queries.shape[1:]
    check_elements("q", q, v, "v", (groups, size))
    keys = check_elements("k", k, v, "q", (groups, size))
    check_groups("q", groups, "heads of v", heads)
    check_flag("delta", delta)
    scale = check_number("scale", scale, "finite", math.isfinite)
    eps = check_eps(eps)
    decays = _rows("log_decay", log_decay, v, values, (heads, size))
    gains = _rows("gain", gain, v, values, (heads,))
    log_gains = _rows("log_gain", log_gain, v, values, (heads,))
    if decays is not None:
        check_decays("log_decay", decays)
    if log_gains is not None:
        _check_alone(gains, delta, decays)
    shapes = [(v._count, heads, size, width), (v._count, heads, size), (v._count, heads)]
    count = 1 if log_gains is None else 3
    states = _states(initial_state, shapes[:count], values)
    starts = check_starts(resets, v, "v")
    queries, keys, values = same_dtypes({"q": queries, "k": keys, "v": values})
    tensors = (queries, keys, values, decays, gains, log_gains, *states)
    output, *finals = attend(tensors, v.offsets, starts, scale, delta, eps)
    return v._like(output), finals[0] if count == 1 else (finals[0], finals[1], finals[2])


def _rows(
    name: str, batch: Any, like: Ragged, values: Tensor, shape: tuple[int, ...]
) -> Tensor | None:
    """Return numbers per head, or of a longer shape per key, in the dtype of sums."""
    if batch is None:
        return None
    check_ragged(name, batch)
    features = shape if batch.values.dim() == 1 + len(shape) else shape[:1]
    rows = check_elements(name, batch, like, "v and k", features)
    return check_parameter(name, rows, tuple(rows.shape), values)


def _check_alone(gains: Tensor | None, delta: bool, decays: Tensor | None) -> None:
    """Raise if log_gain is combined with what mLSTM does not have."""
    is_per_key = decays is not None and decays.dim() == 3
    others = {"a log_decay per key": is_per_key, "gain": gains is not None, "delta": delta}
    for other, is_given in others.items():
        if is_given:
            fix = "leave one of them out"
            raise ArgumentError("log_gain", f"log_gain with {other}", "one without the other", fix)


def _states(
    states: Any, shapes: list[tuple[int, ...]], values: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the three initial states, None for those that begin with zeros or do not exist."""
    if states is None:
        return None, None, None
    if len(shapes) == 1:
        return check_state("initial_state", states, shapes[0], values), None, None
    if not isinstance(states, tuple | list) or len(states) != 3:
        rule = "a tuple of the state, the normaliser and the stabiliser"
        got = f"a {type(states).__name__}"
        raise ArgumentTypeError("initial_state", got, rule, "pass the final state of a call")
    names = ("state", "normaliser", "stabiliser")
    return tuple(
        [
            check_state(f"initial_state ({name})", state, shape, values)
            for name, state, shape in zip(names, states, shapes, strict=True)
        ]
    )
