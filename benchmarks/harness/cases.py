"""The registry of benchmark cases, in suites.

A suite defines the sizes, lengths and modes of its cases, and their competitors. The suite ``grid``
is the product of all cells, sizes, lengths, modes and dtypes; each of the others answers one
question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.lengths import LENGTHS, Lengths
from raglane import cells
from raglane.errors import ArgumentError
from raglane.planner.probe import Size

__all__ = [
    "CELLS",
    "DTYPES",
    "ELEMENTWISE",
    "MODES",
    "SIZES",
    "SUITES",
    "TORCH_CELLS",
    "Case",
    "Size",
    "Suite",
    "operations",
    "select",
    "streamed",
]

TORCH_CELLS = ("lstm", "gru", "rnn_tanh")
"""The cells that torch and other engines support."""

ELEMENTWISE = ("indrnn_tanh", "mingru", "minlstm", "sru", "qrnn")
"""Cells without a matrix in the time loop. With tanh, because at the kink of relu float32 and
float64 diverge."""

CELLS = (*TORCH_CELLS, *ELEMENTWISE)
"""All of them, keys of :data:`raglane.cells.CELLS`."""

MODES = ("train", "infer")
DTYPES = ("float32", "bfloat16")


SIZES = (
    Size(8, 64, 64),
    Size(32, 128, 128),
    Size(64, 256, 256),
    Size(32, 512, 512),
    Size(256, 128, 64),
)


@dataclass(frozen=True)
class Case:
    """One layer on one batch, with all parameters that affect its time.

    Attributes:
        suite: a key of ``SUITES``.
        cell: a key of ``CELLS``.
        size: of batch and layer.
        lengths: of the sequences.
        mode: ``train``: forward and backward, with the gradients of weights and input; ``infer``:
            forward without.
        dtype: of weights and input.
        threads: of the CPU.
    """

    suite: str
    cell: str
    size: Size
    lengths: Lengths
    mode: str
    dtype: str
    threads: int

    @property
    def name(self) -> str:
        """The case in one line, without the facts of a table's heading.

        Example:
            >>> Case("grid", "gru", SIZES[0], LENGTHS["ewt"], "train", "float32", 2).name
            'gru 8x64x64 ewt'
        """
        return f"{self.cell} {self.size} {self.lengths.name}"


def operations(cell: str, size: Size, mode: str) -> int:
    """Floating-point operations per element of a layer's matrix products: forward, and twice as
    many backward.

    Example:
        >>> operations("gru", Size(8, 64, 32), "infer") == 2 * 3 * 64 * (32 + 64)
        True
    """
    shapes = cells.CELLS[cell].shapes(size.input, size.hidden).values()
    forward = 2 * sum(
        shape[0] * shape[1] for shape in shapes if shape is not None and len(shape) == 2
    )
    return forward * (3 if mode == "train" else 1)


def streamed(cell: str, size: Size) -> int:
    """Floats per element that the backward time loop of an element-wise cell must read or write.

    These are the saved tensors, the state, and the gradients of the output and of the input
    products; if the output depends on the input directly, also the input and its gradient.

    Example:
        >>> streamed("indrnn_tanh", Size(8, 64, 32)) == 3 * 64
        True
    """
    gates = len(cells.CELLS[cell].gates)
    skips = cell == "sru"
    saved = 0 if cell.startswith("indrnn") else gates + skips
    return (saved + 1 + 1 + gates + skips) * size.hidden


@dataclass(frozen=True)
class Suite:
    """A question, and the cases that answer it.

    Attributes:
        question: the title of its table.
        cells: the cells of its cases.
        lengths: the names of lengths; empty if the user chooses them.
        sizes: the default sizes.
        competitors: variants of ours that run in addition to :data:`~harness.competitors.RIVALS`
            and ``ours``.
        modes: the supported modes.
        measures_memory: True to measure memory instead of time.
        yardstick: a key of ``YARDSTICKS``, with which the rates of calls are compared.
    """

    question: str
    cells: tuple[str, ...] = TORCH_CELLS
    lengths: tuple[str, ...] = ()
    sizes: tuple[Size, ...] = SIZES
    competitors: tuple[str, ...] = ()
    modes: tuple[str, ...] = MODES
    measures_memory: bool = False
    yardstick: str = "gemm"


SUITES: dict[str, Suite] = {
    "grid": Suite("how fast is a layer on ragged batches", competitors=("ours-float32",)),
    "density": Suite(
        "does an element cost the same in a batch of low density: ours-equal has as many elements at density 1",
        lengths=("density-0.1",),
        sizes=tuple(size for size in SIZES if size.batch >= LENGTHS["density-0.1"].fewest),
        competitors=("ours-equal",),
    ),
    "one-long": Suite(
        "what does one long sequence among many short ones cost",
        lengths=("one-long",),
        sizes=(Size(64, 256, 256),),
    ),
    "tiny": Suite(
        "what does a call cost with almost nothing to compute: ours-kernel has no layer around it, ours-element "
        "is a layer's call on a single element",
        lengths=("tens",),
        sizes=(Size(8, 32, 32),),
        competitors=("ours-kernel", "ours-element"),
    ),
    "drop-in": Suite(
        "what is left of the gain where rl.accelerate's layers get a PackedSequence, or a padded tensor and lengths",
        competitors=("ours-packed", "ours-padded"),
    ),
    "elementwise": Suite(
        "how fast are the cells without a matrix in the time loop: ours-lstm is our LSTM of the same sizes, "
        "torch-steps the same cell as a loop in torch over the steps of a pack, torch-hoisted the same with its "
        "products made before",
        cells=ELEMENTWISE,
        sizes=(Size(64, 256, 256), Size(32, 128, 128)),
        competitors=("ours-lstm",),
    ),
    "loop": Suite(
        "how close to the memory's speed is the time loop of the cells that have nothing else: ours-loop is that of "
        "the backward pass, a call of its own",
        cells=ELEMENTWISE,
        lengths=("lognormal",),
        # More elements than fit into caches, but few enough that the allocator keeps their memory
        # between calls.
        sizes=(Size(128, 256, 64),),
        competitors=("ours-loop",),
        modes=("train",),
        yardstick="copy",
    ),
    "own-cell": Suite(
        "what does a schedule save for a cell that a user wrote, here a GRU in plain torch",
        cells=("gru",),
        lengths=("lognormal",),
        sizes=(Size(64, 128, 128),),
        competitors=("own-each", "own-packed", "own-lanes"),
    ),
    "export": Suite(
        "what does a layer cost as an ONNX file: exported-padded and exported-flat are what rl.export.onnx writes, in "
        "ONNX Runtime",
        cells=(*TORCH_CELLS, *ELEMENTWISE),
        sizes=(Size(8, 64, 64), Size(64, 256, 256)),
        competitors=("exported-padded", "exported-flat"),
        modes=("infer",),
    ),
    "memory": Suite(
        "how much memory does a training step hold at its peak, beyond inputs and parameters, in floats of N * H",
        lengths=("lognormal",),
        # Large, so that other allocations of the process are negligible.
        sizes=(Size(512, 256, 256),),
        modes=("train",),
        measures_memory=True,
    ),
}


def select(
    suites: Sequence[str],
    *,
    cells: Sequence[str],
    sizes: Sequence[Size] | None,
    lengths: Sequence[Lengths],
    modes: Sequence[str],
    dtypes: Sequence[str],
    threads: Sequence[int],
) -> list[Case]:
    """Return the cases of some suites: the product of all arguments.

    Example:
        >>> one = {"cells": ["gru"], "dtypes": ["float32"], "threads": [1]}
        >>> [(case.name, case.mode) for case in select(["tiny"], sizes=None, lengths=[], modes=MODES, **one)]
        [('gru 8x32x32 tens', 'train'), ('gru 8x32x32 tens', 'infer')]
    """
    cases: list[Case] = []
    for count in threads:
        for name in suites:
            suite = SUITES[name]
            own = [LENGTHS[length] for length in suite.lengths] or lengths
            cases += [
                Case(name, cell, size, length, mode, dtype, count)
                for dtype in (dtypes if not suite.measures_memory else ("float32",))
                for cell in cells
                if cell in suite.cells
                for length in own
                for size in (suite.sizes if sizes is None else sizes)
                for mode in modes
                if mode in suite.modes
            ]
    for case in cases:
        if case.size.batch < case.lengths.fewest:
            raise ArgumentError(
                "sizes",
                str(case.size),
                f"of at least {case.lengths.fewest} sequences for lengths {case.lengths.name}",
                "pass a larger batch, or leave the suite out",
            )
    if not cases:
        raise ArgumentError(
            "suites",
            ", ".join(suites),
            "suites with at least one case for the other options",
            "add cells or modes",
        )
    return list(dict.fromkeys(cases))
