"""What a program means, on cells small enough to compute beside it."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from program_interpreter import run_program
from raglane.programs.program import Block, Instruction, Operand, Program


def test_a_leaky_unit_runs_over_a_ragged_batch_in_both_directions() -> None:
    blocks = (Block("element", 2), Block("state", 2), Block("local", 2), Block("local", 2))
    leak = Instruction("fma", (Operand(2),), (Operand(1), Operand(-1, number=0.5), Operand(0)), width=2)
    squash = Instruction("tanh", (Operand(3),), (Operand(2),), width=2)
    leaky = Program(blocks, (), (leak, squash), ((Operand(3), 2),), (Operand(2),))
    rng = np.random.default_rng(0)
    x, h = rng.normal(size=(5, 2)), rng.normal(size=(3, 2))
    for ascending in (True, False):
        (output,), (final,) = run_program(leaky, [0, 2, 2, 5], ascending=ascending, elements=[x], states=[h])
        first, second = (0, 1) if ascending else (1, 0)
        state = 0.5 * (0.5 * h[0] + x[first]) + x[second]
        np.testing.assert_allclose(final[0], state)
        np.testing.assert_allclose(output[second], np.tanh(state))
        np.testing.assert_array_equal(final[1], h[1])


def test_norm_and_its_gradient_are_those_of_torch() -> None:
    blocks = (Block("element", 12), Block("element", 12, 1), *(Block("local", size) for size in (12, 2, 12)))
    norm = Instruction("norm", (Operand(2), Operand(3)), (Operand(0),), width=12, segments=2, epsilon=1e-5)
    back = Instruction("norm_backward", (Operand(4),), (Operand(1), Operand(2), Operand(3)), width=12, segments=2)
    program = Program(blocks, (), (norm, back), ((Operand(2), 12), (Operand(4), 12)), ())
    a, g = torch.randn(3, 12, dtype=torch.float64, requires_grad=True), torch.randn(3, 12, dtype=torch.float64)
    expected = F.layer_norm(a.view(3, 2, 6), (6,)).view(3, 12)
    (gradient,) = torch.autograd.grad(expected, a, g)
    outputs, _ = run_program(program, [0, 3], elements=[a.detach().numpy(), g.numpy()])
    np.testing.assert_allclose(outputs[0], expected.detach().numpy())
    np.testing.assert_allclose(outputs[1], gradient.numpy())
