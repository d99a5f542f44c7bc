"""Runs models of other packages with and without rl.accelerate: ``make peers``, which writes
docs/works-with.md.

Each package has an environment of its own in build/peers, with the requirements below, on top of
one with Raglane. The examples are in tests/peers, and pass only within the bounds there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / "build/peers"
EXAMPLES = ROOT / "tests/peers"
PAGE = ROOT / "docs/works-with.md"

# By name of the package: the examples, and requirements other than the package.
PEERS: dict[str, tuple[list[str], list[str]]] = {
    "pytorch-forecasting": (
        ["forecasting:pytorch_forecasting", "forecasting:deepar", "forecasting:temporal_fusion"],
        ["lightning"],
    ),
    "neuralforecast": (["forecasting:neuralforecast"], []),
    "darts": (["forecasting:darts"], ["pytorch-lightning"]),
    "gluonts": (["forecasting:gluonts"], ["lightning", "pytorch-lightning", "scipy"]),
    "pypots": (["forecasting:pypots"], []),
    "sb3-contrib": (["reinforcement:sb3_contrib"], []),
    "torchrl": (["reinforcement:torchrl"], []),
    "skrl": (["reinforcement:skrl"], []),
    "flair": (["language:flair"], []),
    "stanza": (["language:stanza"], []),
    "xlstm": (["language:xlstm"], []),
    "speechbrain": (["speech:speechbrain"], ["requests"]),
    "openunmix": (["speech:openunmix"], []),
    "asteroid": (["speech:asteroid"], ["requests", "huggingface_hub"]),
    "recbole": (["recommendation:recbole"], ["numpy<2", "scipy<1.14", "pandas<3"]),
    "skorch": (["training:skorch"], []),
    "lightning": (["training:lightning"], []),
    "accelerate": (["training:accelerate"], []),
    "transformers": (
        [
            "training:transformers",
            *("mixers:mamba", "mixers:falcon_mamba", "mixers:mamba2", "mixers:qwen3_5"),
            *("mixers:bamba", "mixers:recurrent_gemma", "mixers:xlstm"),
        ],
        ["accelerate"],
    ),
    "optuna": (["training:optuna"], []),
    "keras": (["weights:keras"], []),
    "flax": (["weights:flax"], []),
    "onnx": (["weights:onnx"], ["onnxruntime"]),
    "tirex-ts": (["weights:tirex"], []),
}

# The reasons why other packages have no example.
LEFT = {
    "opacus": "its DPLSTM, DPGRU and DPRNN are loops over linear layers, because it needs the gradient of each sample; "
    "`rl.accelerate` replaces none of them.",
    "silero-vad": "its model is TorchScript, which has no layers of `torch.nn` to replace.",
    "deepfilternet": "version 0.5.6 imports `torchaudio.backend`, which torchaudio 2.9 removed.",
}

# Of tests/peers/formats.py. These kernels are of the same release as TorchRec, for the torch of
# constraints.txt.
FORMATS = [
    "awkward",
    "datasets",
    "transformers",
    "fbgemm-gpu-cpu==1.8.0",
    "tensordict",
    "iopath",
    "pyre-extensions",
]
TORCHREC = "torchrec==1.8.0"

_HEAD = """# Works with

`rl.accelerate` on models of other packages: a small example of each is run and trained with and without it, on data
that is made for it. `make peers` repeats the table, in an environment per package.

- **Differences** are the largest of outputs and gradients of one batch, relative to the largest number. In float64 they
  must be at most 1e-10, in float32 1e-5.
- **Training** is the largest relative difference of the losses of a short training, in float64 at most 1e-8, by the
  package's own trainer if it is a package for training. "float32" marks packages that compute only in float32.
- **Time** and **memory** are those of a training step (forward and backward) with Raglane, divided by those without:
  below 1 is better. Small models, {machine}.

Weights pass in both directions through `state_dict`, and accelerated models can be pickled, in all of them.

| package | example | layers | float64 | float32 | training | time | memory |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""

_MIXERS = """
## Mixers of transformers

Language models of transformers from 5.24 on, with recurrent mixers: Mamba, FalconMamba, Mamba-2, Qwen3-Next, Qwen3.5,
OLMo Hybrid, Kimi Linear, RecurrentGemma, xLSTM, Bamba, FalconH1, Zamba2, Jamba, Nemotron-H and Granite MoE Hybrid.
[What `rl.accelerate` does with them](from-torch/accelerate.md#language-models-of-transformers). Without their CUDA
kernels they compute in float32 inside, so they are compared in it. Rows of 128 tokens, a width of 64, {machine}.

| package | example | layers | float64 | float32 | training | time | memory |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""

_WEIGHTS = """
## Weights of other packages

[`rl.import_layer`](weights.md) on layers of other packages, and the differences of their outputs and final states.

| package | example | float64 | float32 |
| --- | --- | --- | --- |
"""

_EPISODES = """
## Episodes in reinforcement learning

sb3-contrib's policies run an LSTM step by step if an episode starts within a sequence, and torchrl's modules split and
pad such sequences. `rl.accelerate(agent.policy)`, or of the modules, makes one call of the layer instead. A policy that
overrides `_process_sequence`, and a module with another `recurrent_backend` than "pad", are not changed.

[Whole trainings](../benchmarks/results/recurrent-ppo.md) of RecurrentPPO with one thread, seconds per update and mean
returns at the end:

| task, steps of an episode | sb3-contrib | with rl.accelerate | returns |
| --- | --- | --- | --- |
| CartPole without velocities, about 90 at the end | 4.33 | 0.70 | 91, 95 |
| Recall, 3 to 17 | 0.93 | 0.52 | 0.96, 1.00 |

sb3-contrib makes its batches in both, which is about half of the 0.52 seconds.
"""


def main() -> int:
    """Run the packages that are named as arguments, or all, and write the page if all pass; return
    1 if one fails.
    """
    names = sys.argv[1:] or list(PEERS)
    _install(
        "base",
        [str(max((ROOT / "dist").glob("raglane-*.whl"), key=lambda path: path.stat().st_mtime))],
    )
    rows: list[str] = []
    weights: list[str] = []
    mixers: list[str] = []
    tables = {"weights": weights, "mixers": mixers}
    failed: list[str] = []
    for name in names:
        examples, requirements = PEERS[name]
        python = _install(name, [name, *requirements])
        for example in examples:
            answer = _run(python, name, example)
            print(name, example, answer, flush=True)
            if isinstance(answer, str):
                failed.append(f"{name}: {answer}")
            else:
                tables.get(example.partition(":")[0], rows).append(_row(name, answer))
    if not sys.argv[1:] and not _converts():
        failed.append("formats: a conversion is wrong")
    if names == list(PEERS) and not failed:
        left = "".join(f"- **{name}**: {reason}\n" for name, reason in LEFT.items())
        head, tail = (
            f"{_HEAD.format(machine=_machine())}{''.join(rows)}",
            f"{_MIXERS.format(machine=_machine())}{''.join(mixers)}"
            f"{_WEIGHTS}{''.join(weights)}{_EPISODES}",
        )
        PAGE.write_text(f"{head}\n## Without an example\n\n{left}{tail}")
    print(*failed, sep="\n")
    return int(bool(failed))


def _converts() -> bool:
    """Return True if the conversions from and to formats of other packages pass."""
    python = _install("formats", FORMATS)
    # It requires kernels compiled for CUDA.
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", TORCHREC], check=True)
    return (
        subprocess.run([python, "-W", "ignore", EXAMPLES / "formats.py"], check=False).returncode
        == 0
    )


def _install(name: str, requirements: list[str]) -> Path:
    """Return the Python of an environment, which is made first if it does not exist."""
    folder = ENVIRONMENTS / name
    python = folder / "bin/python"
    if (folder / "ready").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    packages = next(folder.glob("lib/python3*/site-packages"))
    if name != "base":
        base = next((ENVIRONMENTS / "base").glob("lib/python3*/site-packages"))
        (packages / "base.pth").write_text(f"{base}\n")
    pins: list[str | Path] = ["--constraint", ROOT / "constraints.txt"] if name == "base" else []
    torch = (
        "torch"
        if name == "base"
        else f"torch=={_version(ENVIRONMENTS / 'base/bin/python', 'torch')}"
    )
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *pins, torch, *requirements], check=True
    )
    # Its kernels are compiled for torch with CUDA, and none of the examples needs them.
    for library in packages.glob("torchaudio/lib/_torchaudio*.so"):
        library.unlink()
    (folder / "ready").touch()
    return python


def _version(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def _run(python: Path, package: str, example: str) -> dict[str, Any] | str:
    """Return the measurements of an example, or the error."""
    module, function = example.split(":")
    code = (
        f"import json, {module}; from {'weights' if module == 'weights' else 'comparison'} import compare; "
        f"print(json.dumps({{'about': {module}.{function}.__doc__}} | compare({module}.{function})))"
    )
    ran = subprocess.run(
        [python, "-W", "ignore", "-c", code],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if ran.returncode:
        return ran.stderr.strip().splitlines()[-1]
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found | {"version": _version(python, package)}


def _row(name: str, found: dict[str, Any]) -> str:
    double = f"{found['difference float64']:.0e}" if "difference float64" in found else "float32"
    start, differences = (
        [f"{name} {found['version']}", found["about"].splitlines()[0].rstrip(".")],
        [double],
    )
    differences.append(f"{found['difference float32']:.0e}")
    if "layers" in found:
        start.append(str(found["layers"]))
        differences.append(f"{found['curve']:.0e}")
        differences += [
            f"{found[f'raglane {unit}'] / max(found[f'torch {unit}'], 1e-9):.2f}"
            for unit in ("ms", "MB")
        ]
    return f"| {' | '.join([*start, *differences])} |\n"


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{model}, {sum(line.startswith('processor') for line in lines)} processors"


if __name__ == "__main__":
    sys.exit(main())
