"""The base of converted mixers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from raglane.kernels.cpu.steps import can_step
from raglane.nn.porting.transformers.layout import BatchLayout, layout_of
from raglane.nn.porting.transformers.memory import Memory


def of_converted(forward: Callable[..., Any]) -> Any:
    """Make a forward call that of the module's class after rl.to_torch, when a closure that replaced
    it still does.
    """

    @wraps(forward)
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        kind = type(module)
        method = forward if hasattr(kind, "_theirs") else kind.forward
        return method(module, *args, **kwargs)

    return run


class Mixer:
    """A mixer that computes the elements of its batch without padding.

    The classes of a family follow it in the order of methods: the converted class inherits from
    both, and has the attributes and modules of that of transformers.
    """

    # The models have attention too, and pass all arguments on; others pass only the mask.
    has_attention: ClassVar[bool] = False
    # Their attention does not separate sequences by positions.
    needs_mask: ClassVar[bool] = False
    # They pass no mask of padding on.
    needs_padding: ClassVar[bool] = False
    # Their blocks get arguments of the call at all.
    is_passed: ClassVar[bool] = True
    # Attributes of instances that the class before does not have.
    added: ClassVar[tuple[str, ...]] = ()
    layer_idx: Any

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute or a module of the class of transformers."""

    @staticmethod
    def remember(numbers: Tensor | None) -> None:
        """Keep the numbers of a call whose model does not pass them on, or forget them."""

    def adopt(self, name: str) -> None:
        """Prepare a mixer that was converted, by its name in the model."""

    @of_converted
    def forward(
        self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Tensor:
        """Return the outputs ``(B, T, D)``, zeros for padding.

        Args:
            hidden_states: ``(B, T, D)``.
            cache: of transformers; its states are read and written.
            attention_mask: ``(B, T)``: 0 for padding. Another sequence begins where it changes to
                another number.
            **kwargs: ``seq_idx``, numbers of sequences ``(B, T)``; others have no effect.
        """
        cache = kwargs.get("cache_params", cache)
        layout = layout_of(hidden_states, kwargs.get("seq_idx"), attention_mask)
        layout = layout.restarted(kwargs.get("position_ids"))
        memory = Memory(cache, self.layer_idx, layout)
        if not hidden_states.is_cpu and _runs_elsewhere(layout, memory):
            return super().forward(hidden_states, cache, attention_mask, **kwargs)  # type: ignore[misc]
        if layout.is_step and can_step(hidden_states):
            output = self._stepped(hidden_states, memory)
            if output is not None:
                return output
        rows = layout.rows(hidden_states)
        return layout.batch(self._mix(rows, layout, memory).to(hidden_states.dtype))

    def _stepped(self, rows: Tensor, memory: Memory, norm: Any = None) -> Tensor | None:  # noqa: ARG002
        """Return the outputs of one element of each row by one call of the kernels, ``(B, 1, D)``;
        None if that is not possible.

        With ``norm`` they are those of a block: a norm before the mixer, and the rows added.
        """
        return None

    def _mix(self, rows: Tensor, layout: BatchLayout, memory: Memory) -> Tensor:
        """Return the outputs of rows ``(1, N, D)``, or ``(B, T, D)`` without padding."""
        raise NotImplementedError


def _runs_elsewhere(layout: BatchLayout, memory: Memory) -> bool:
    """Return True for a call without lengths, which kernels for a GPU may run."""
    has_lengths = layout.elements is not None or layout.resets is not None
    return not has_lengths and (memory.is_empty or layout.shape[1] == 1)


def apply_to(module: nn.Module, flat: Tensor, rows: Tensor) -> Tensor:
    """Return a module of flat rows ``(N, D)``, which it sees in the dimensions of ``rows``."""
    result: Tensor = module(flat.unflatten(0, rows.shape[:2]))
    return result.flatten(0, 1)
