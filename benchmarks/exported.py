"""Accuracy and speed of exported runs: the model here, its ONNX file, and that file in float16 and
int8.

    python benchmarks/exported.py runs/vowels runs/names runs/tags

Runs must record their test data; --passes 1 measures only accuracy. float16: weights and operators
outside of the recurrent nodes; int8: ONNX Runtime's dynamic quantisation. Padded batches of 64 in
the order of the data; medians of whole passes over the test data, interleaved.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16

import raglane as rl
from raglane.runs.exported import RunModule
from raglane.runs.run import Run

BATCH = 64
Answers = Callable[[], list[Any]]


def batches_of(run: Run) -> tuple[list[rl.Ragged], list[int]]:
    """Return the test data in the form of the file's input, not scaled, and the classes."""
    records = run.test_part()
    dataset = run.preprocessor.apply(records)
    raw = (
        torch.from_numpy(np.ascontiguousarray(records.values))
        if not run.preprocessor.is_tokens
        else dataset.values
    )
    whole = rl.Ragged.from_flat(raw, offsets=torch.from_numpy(records.offsets.copy()))
    return [
        whole[start : start + BATCH] for start in range(0, len(whole), BATCH)
    ], dataset.targets.tolist()


def in_runtime(path: Path, batches: list[rl.Ragged]) -> Answers:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = [[part.numpy() for part in batch.to_padded()] for batch in batches]
    return lambda: [
        session.run(None, dict(zip(("values", "lengths"), pair, strict=True)))[0] for pair in given
    ]


def here(run: Run, batches: list[rl.Ragged]) -> Answers:
    module = RunModule(run.model, run.preprocessor).eval()

    def answers() -> list[Any]:
        with torch.inference_mode():
            return [next(iter(module(batch).values())) for batch in batches]

    return answers


def classes(answers: list[Any], batches: list[rl.Ragged]) -> list[int]:
    """Return the most likely class of each sequence or element."""
    found: list[int] = []
    for answer, batch in zip(answers, batches, strict=True):
        rows = answer.values if isinstance(answer, rl.Ragged) else torch.as_tensor(answer)
        if rows.dim() == 3:
            rows = rl.Ragged.from_padded(rows, batch.lengths).values
        found += rows.argmax(-1).tolist()
    return found


def once_each(model: Any) -> Any:
    """Return the model without duplicate casts, which ONNX Runtime's converter writes for a tensor
    of several nodes.
    """
    known: set[str] = set()
    kept = []
    for node in model.graph.node:
        if known.isdisjoint(node.output):
            kept.append(node)
        known.update(node.output)
    for number, node in enumerate(kept):
        node.name = f"node_{number}"
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def variants(run: Run, batches: list[rl.Ragged], folder: Path) -> dict[str, tuple[Answers, int]]:
    plain, half, whole = (folder / f"{name}.onnx" for name in ("float32", "float16", "int8"))
    run.export(plain)
    model = onnx.load(str(plain))
    # ONNX Runtime has no kernel of its recurrent operators for float16 on a CPU: their weights
    # stay.
    blocked = ["LSTM", "GRU", "RNN", "Scan", "Range", "Cast", "NonZero"]
    onnx.save(
        once_each(convert_float_to_float16(model, keep_io_types=True, op_block_list=blocked)),
        str(half),
    )
    quantize_dynamic(str(plain), str(whole))
    found = {"Raglane": (here(run, batches), 0)}
    for path in (plain, half, whole):
        try:
            found[f"ONNX {path.stem}"] = in_runtime(path, batches), path.stat().st_size
        except Exception as error:
            print(f"{path.stem}: refused by ONNX Runtime: {str(error).splitlines()[-1][:120]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--passes", type=int, default=7, help="over the test part, of each way")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # of the quantisation, about nodes that it does not convert
    for place in given.runs:
        run = rl.load(place)
        batches, right = batches_of(run)
        with tempfile.TemporaryDirectory() as folder:
            ways = variants(run, batches, Path(folder))
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(max(given.passes, 1)):
                for name, (answers, _) in ways.items():
                    start = time.perf_counter()
                    answers()
                    times[name].append(time.perf_counter() - start)
            print(f"\n{run}\n{'':14} accuracy  milliseconds of a pass  bytes")
            for name, (answers, size) in ways.items():
                share = statistics.fmean(
                    a == b for a, b in zip(classes(answers(), batches), right, strict=True)
                )
                print(
                    f"{name:14} {share:8.4f}  {1e3 * statistics.median(times[name]):22.1f}  {size or '':>9}"
                )


if __name__ == "__main__":
    main()
