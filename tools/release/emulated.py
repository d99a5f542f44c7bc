"""Runs on another processor, in an emulator: a layer in both directions equals torch's, forward and
backward.
"""

from __future__ import annotations

import platform

import torch

import raglane as rl


def main() -> None:
    """Print the backend; raise if the kernels are not used, or are wrong."""
    torch.manual_seed(0)
    theirs = torch.nn.LSTM(5, 19, bidirectional=True)
    ours = rl.nn.LSTM(5, 19, bidirectional=True)
    ours.load_state_dict(theirs.state_dict())
    sequences = [torch.randn(length, 5) for length in (7, 0, 1, 12)]
    batch = rl.Ragged(sequences)
    print(f"{platform.machine()}, torch {torch.__version__}: {rl.explain(ours, batch)}")
    if rl.explain(ours, batch).backend != "cpu":
        raise SystemExit("the kernels are not used")
    out = ours(batch)[0].values
    wanted = torch.cat([theirs(sequence)[0] for sequence in sequences if len(sequence)])
    torch.testing.assert_close(out, wanted)
    out.square().sum().backward()
    wanted.square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    print("the outputs and gradients are those of torch")


if __name__ == "__main__":
    main()
