"""Which backend runs which schedule: one table, one choice, and the reason for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from raglane._utils.messages import message
from raglane._utils.tracing import are_transforms_active, constant_when_traced
from raglane.errors import DispatchError
from raglane.kernels import program, reference
from raglane.kernels import torch as torch_kernels
from raglane.kernels.contract import Backend, Traits
from raglane.kernels.cpu import backend as cpu
from raglane.schedules import SCHEDULES

AUTO = "auto"

BACKENDS: dict[str, Backend] = {
    "cpu": cpu.BACKEND,
    "program": program.BACKEND,
    "torch": torch_kernels.BACKEND,
    "reference": reference.BACKEND,
}
"""The backends by name, in the order in which ``auto`` prefers them."""

_PREFERRED_SCHEDULES = ("packed", *(name for name in SCHEDULES if name != "packed"))


@dataclass(frozen=True)
class Choice:
    """What runs a layer, and why.

    Attributes:
        backend: a key of ``BACKENDS``.
        schedule: a key of ``SCHEDULES``.
        reason: why these two, in words.
        program: what the backend ``program`` runs, to be read, where it was asked for.

    Example:
        >>> print(Choice("torch", "packed", "the first backend that runs this"))
        backend torch, schedule packed: the first backend that runs this
    """

    backend: str
    schedule: str
    reason: str
    program: str = ""

    def __str__(self) -> str:
        said = f"backend {self.backend}, schedule {self.schedule}: {self.reason}"
        return f"{said}\n{self.program}" if self.program else said


_override: ContextVar[tuple[str, str]] = ContextVar("raglane_override", default=(AUTO, AUTO))


@constant_when_traced
def override() -> tuple[str, str]:
    """Schedule and backend that :func:`use_backend` set."""
    return _override.get()


@contextmanager
def use_backend(*, schedule: str = AUTO, backend: str = AUTO) -> Iterator[None]:
    """Decide for all layers within the block, whatever they were built with.

    The decision holds for the thread or task that entered the block, and ends with it. What ``torch.compile`` has
    compiled keeps the decision that held then.

    Args:
        schedule: a key of ``SCHEDULES``, or ``"auto"``.
        backend: a key of ``BACKENDS``, or ``"auto"``.

    Raises:
        DispatchError: no such schedule, backend or pair.

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


def choose(traits: Traits, schedule: str = AUTO, backend: str = AUTO, *, dense: bool = False) -> Choice:
    """Pick a backend and a schedule, and say why.

    NOTE (batch invariance): only what ``traits`` holds may decide, never the number of sequences or their lengths,
    so that a sequence's results are bit-identical in any batch.
    """
    passed_over: list[str] = []
    name, wanted = pick(traits, schedule, backend, dense=dense, passed_over=passed_over)
    origin = "chosen for this layer"
    if override() != (AUTO, AUTO):
        (schedule, backend), origin = override(), "chosen by rl.use_backend"
    return Choice(name, wanted, _reason(schedule, backend, origin, passed_over))


def pick(
    traits: Traits,
    schedule: str = AUTO,
    backend: str = AUTO,
    *,
    dense: bool = False,
    passed_over: list[str] | None = None,
) -> tuple[str, str]:
    """The backend and the schedule that :func:`choose` explains, without the reasons, for every call of a layer."""
    # One by one: torch 2.11 cannot compile a comparison of what is constant while it traces with a tuple.
    chosen = override()
    if chosen[0] != AUTO or chosen[1] != AUTO:
        schedule, backend = chosen
    if schedule != AUTO or backend != AUTO:
        check_names(schedule, backend)
    if are_transforms_active():
        backend = "reference"  # it is plain torch, all of which torch.func knows
    refusals = [] if passed_over is None else passed_over
    for name, candidate in BACKENDS.items():
        if backend != AUTO and backend != name:
            continue
        wanted = _schedule_for(candidate, schedule, dense)
        if wanted is None:
            continue
        refusal = candidate.refuses(traits, wanted)
        if refusal is None:
            return name, wanted
        refusals.append(refusal)
    got, rule = f"{schedule!r}, {backend!r}", "; ".join(refusals) or "no backend runs that schedule"
    fix = f"choose among {_pairs()}, or leave both at 'auto'"
    raise DispatchError(message("schedule, backend", got, rule, fix))


def _schedule_for(candidate: Backend, schedule: str, dense: bool) -> str | None:
    """The schedule that a backend would run: the one asked for, else its best; None where it does not have it."""
    if schedule != AUTO:
        return schedule if schedule in candidate.schedules else None
    if dense and "padded" in candidate.schedules:
        return "padded"
    known = candidate.schedules
    for name in _PREFERRED_SCHEDULES:
        if name in known:
            return name
    return None


def _reason(schedule: str, backend: str, origin: str, passed_over: list[str]) -> str:
    named = [f"{kind} {name}" for kind, name in (("schedule", schedule), ("backend", backend)) if name != AUTO]
    reason = f"{' and '.join(named)} {origin}" if named else "auto takes the fastest backend that runs this"
    return "; ".join([reason, *passed_over])


def check_names(schedule: str, backend: str) -> None:
    """Raise a DispatchError where a schedule, a backend or the pair of them does not exist."""
    for argument, name, known in (("schedule", schedule, SCHEDULES), ("backend", backend, BACKENDS)):
        if name != AUTO and not (isinstance(name, str) and name in known):
            rule = f"one of {', '.join(known)} or auto"
            raise DispatchError(message(argument, repr(name), rule, f"the pairs are {_pairs()}"))
    if backend != AUTO and schedule != AUTO and schedule not in BACKENDS[backend].schedules:
        got, rule = f"{schedule!r}, {backend!r}", f"backend {backend} runs {', '.join(BACKENDS[backend].schedules)}"
        raise DispatchError(message("schedule, backend", got, rule, f"choose among {_pairs()}"))


def _pairs() -> str:
    return ", ".join(f"({schedule}, {name})" for name, backend in BACKENDS.items() for schedule in backend.schedules)
