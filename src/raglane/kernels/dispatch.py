"""The table of backends, and the choice of a backend and a schedule with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from raglane._utils.tracing import are_transforms_active, constant_when_traced
from raglane.cells.module import ModuleCell
from raglane.errors import DispatchError
from raglane.kernels import program, reference
from raglane.kernels import torch as torch_kernels
from raglane.kernels.contract import Backend, InputKind, Traits
from raglane.kernels.cpu import backend as cpu
from raglane.schedules import SCHEDULES

AUTO = "auto"

BACKENDS: dict[str, Backend] = {
    "cpu": cpu.BACKEND,
    "program": program.BACKEND,
    "torch": torch_kernels.BACKEND,
    "triton": program.GPU,
    "reference": reference.BACKEND,
}
"""The backends by name, in the order in which ``auto`` prefers them; see :func:`_in_order`."""

# Up to so many units, the loop of a printed kernel takes less time than cuDNN's launches for each
# step of a pack: on an H200 a GRU of 128 units trains 3 times as fast, and inference of one of 256
# takes as long.
_MOST_PRINTED = 128
_PREFERRED_SCHEDULES = ("packed", *(name for name in SCHEDULES if name != "packed"))


@dataclass(frozen=True)
class Choice:
    """The backend and schedule of a layer's call, and the reason.

    Attributes:
        backend: a key of ``BACKENDS``.
        schedule: a key of ``SCHEDULES``.
        reason: why they were chosen.
        program: the listing of the program that the backend ``program`` runs, if it was requested.

    Example:
        >>> print(Choice("torch", "packed", "the first backend that runs this"))
        backend torch, schedule packed: the first backend that runs this
    """

    backend: str
    schedule: str
    reason: str
    program: str = ""

    def __str__(self) -> str:
        text = f"backend {self.backend}, schedule {self.schedule}: {self.reason}"
        return f"{text}\n{self.program}" if self.program else text


_override: ContextVar[tuple[str, str]] = ContextVar("raglane_override", default=(AUTO, AUTO))


@constant_when_traced
def override() -> tuple[str, str]:
    """Return the schedule and backend that :func:`use_backend` set."""
    return _override.get()


@contextmanager
def use_backend(*, schedule: str = AUTO, backend: str = AUTO) -> Iterator[None]:
    """Select the schedule and backend of all layers in a ``with`` block.

    They override the ``schedule`` and ``backend`` arguments of the layers. Other threads and
    asyncio tasks are not affected. A function compiled by ``torch.compile`` keeps the choice that
    was in effect when it was compiled.

    Args:
        schedule: a key of ``SCHEDULES``, or ``"auto"``.
        backend: a key of ``BACKENDS``, or ``"auto"``.

    Raises:
        DispatchError: the schedule or the backend does not exist, or the backend does not support
            the schedule.

    Example:
        >>> import raglane as rl
        >>> layer, batch = rl.nn.GRU(3, 4), rl.Ragged([torch.randn(2, 3)])
        >>> with use_backend(backend="reference"):
        ...     rl.explain(layer, batch).backend
        'reference'
    """
    check_names(schedule, backend)
    token = _override.set((schedule, backend))
    try:
        yield
    finally:
        _override.reset(token)


def choose(
    traits: Traits, schedule: str = AUTO, backend: str = AUTO, *, kind: InputKind = "flat"
) -> Choice:
    """Return the backend, the schedule and the reason.

    NOTE (batch invariance): only ``traits`` may decide, not the number of sequences or their
    lengths, so that the results of a sequence are bit-identical in any batch.
    """
    refusals: dict[str, str] = {}
    name, used_schedule = pick(traits, schedule, backend, kind=kind, refusals=refusals)
    origin = "chosen for this layer"
    if override() != (AUTO, AUTO):
        schedule, backend = override()
        origin = "chosen by rl.use_backend"
    named = [
        f"{kind} {name}"
        for kind, name in (("schedule", schedule), ("backend", backend))
        if name != AUTO
    ]
    reason = (
        f"{' and '.join(named)} {origin}"
        if named
        else "auto takes the fastest backend that runs this"
    )
    first, others = _reasons(traits, refusals)
    return Choice(name, used_schedule, "; ".join([*first, reason, *others]))


def pick(
    traits: Traits,
    schedule: str = AUTO,
    backend: str = AUTO,
    *,
    kind: InputKind = "flat",
    refusals: dict[str, str] | None = None,
) -> tuple[str, str]:
    """Return the backend and the schedule for a call.

    Reasons against preferred backends are added to ``refusals``, by the names of these.
    """
    # Compared one by one: torch 2.11 cannot compile the comparison of a traced constant with a
    # tuple.
    chosen = override()
    if chosen[0] != AUTO or chosen[1] != AUTO:
        schedule, backend = chosen
    if schedule != AUTO or backend != AUTO:
        check_names(schedule, backend)
    if are_transforms_active():
        backend = "reference"  # plain torch operators, all of which torch.func supports
    refusals = {} if refusals is None else refusals
    for name in _in_order(traits, kind):
        candidate = BACKENDS[name]
        if backend != AUTO and backend != name:
            continue
        used_schedule = _schedule_for(candidate, schedule, kind == "dense")
        if used_schedule is None:
            continue
        refusal = candidate.refuses(traits, used_schedule)
        if refusal is None:
            return name, used_schedule
        refusals[name] = refusal
    first, others = _reasons(traits, refusals)
    reasons = "; ".join([*first, *others]) or "no backend runs that schedule"
    rule = f"a pair that runs this layer ({reasons})"
    fix = f"choose among {_pairs(traits)}, or leave both at 'auto'"
    raise DispatchError("schedule, backend", f"{schedule!r}, {backend!r}", rule, fix)


def _reasons(traits: Traits, refusals: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the reason against a user's cell as a program, or those against all backends here."""
    program_backend = "triton" if traits.device.type == "cuda" else "program"
    if isinstance(traits.cell, ModuleCell) and program_backend in refusals:
        return [refusals[program_backend]], []
    names = set(refusals)
    if not torch.cuda.is_available() and names != {"triton"}:
        names.discard("triton")
    return [], list(dict.fromkeys(reason for name, reason in refusals.items() if name in names))


def _in_order(traits: Traits, kind: InputKind) -> list[str]:
    """Return the backends in the order of preference."""
    names = list(BACKENDS)
    if traits.device.type == "cuda" and traits.hidden_size <= _MOST_PRINTED and kind == "flat":
        names.remove("triton")
        names.insert(names.index("torch"), "triton")
    return names


def _schedule_for(candidate: Backend, schedule: str, dense: bool) -> str | None:
    """Return the requested schedule, or a backend's preferred one; None if it is unsupported."""
    if schedule != AUTO:
        return schedule if schedule in candidate.schedules else None
    if dense and "padded" in candidate.schedules:
        return "padded"
    return next((name for name in _PREFERRED_SCHEDULES if name in candidate.schedules), None)


def check_names(schedule: str, backend: str) -> None:
    """Raise a DispatchError if a name does not exist, or the backend does not run the schedule."""
    for argument, name, names in (
        ("schedule", schedule, SCHEDULES),
        ("backend", backend, BACKENDS),
    ):
        if name != AUTO and not (isinstance(name, str) and name in names):
            rule = f"one of {', '.join(names)} or auto"
            raise DispatchError(argument, repr(name), rule, f"choose among {_pairs()}")
    if backend != AUTO and schedule != AUTO and schedule not in BACKENDS[backend].schedules:
        rule = f"a schedule of the backend {backend}, which runs {', '.join(BACKENDS[backend].schedules)}"
        raise DispatchError(
            "schedule, backend", f"{schedule!r}, {backend!r}", rule, f"choose among {_pairs()}"
        )


def _pairs(traits: Traits | None = None) -> str:
    """List the pairs of a schedule and a backend that exist, or that run a layer."""
    return ", ".join(
        f"({schedule}, {name})"
        for name, backend in BACKENDS.items()
        for schedule in backend.schedules
        if traits is None or backend.refuses(traits, schedule) is None
    )
