"""``examples/c``: a program in C, with only the library and its header, prints the bits that Python
prints.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import raglane as rl
import raglane.native
from raglane.data.prepare.encoders import END, UNKNOWN
from raglane.data.prepare.preprocess import Preprocessor
from raglane.native import missing_kernels
from raglane.runs.run import Run
from raglane.training.checkpoint import SavedModel
from raglane.training.inference import answering
from raglane.training.model import ModelConfig, SequenceModel

pytestmark = [
    pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels())),
    pytest.mark.skipif(
        not (shutil.which("cmake") and shutil.which("cc")), reason="needs cmake and a C compiler"
    ),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "c"
VOCABULARY = (UNKNOWN, END, *"abcdefg")
CELLS = ("lstm", "gru", "rnn", "indrnn", "sru", "qrnn", "mingru", "minlstm")
POOLINGS = ("final", "mean", "max", "last", "first")
DROPOUTS = ("", "input_", "state_", "weight_", "embedding_")
LENGTHS = [3, 0, 1, 40]
STRICT = "-Wall -Wextra -Werror"
SANITIZED = f"{STRICT} -g -fsanitize=address,undefined -fno-sanitize-recover=all"


def built(folder: Path, flags: str) -> Path:
    """Build the example with its CMakeLists.txt and the files of an installation."""
    prefix, build = folder / "native", folder / "build"
    for source, place in (
        ("abi/raglane.h", "include"),
        ("abi/recurrences.h", "include"),
        ("abi/channels.h", "include"),
        ("cmake/raglaneConfig.cmake", "lib/cmake/raglane"),
    ):
        (prefix / place).mkdir(parents=True, exist_ok=True)
        shutil.copy(EXAMPLE.parents[1] / "csrc" / source, prefix / place)
    found = [
        file
        for place in raglane.native.__path__
        for file in Path(place, "lib").glob("libraglane_cpu.*")
    ]
    shutil.copy(found[0], prefix / "lib")
    options = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_C_FLAGS={flags}"]
    for command in (
        ["cmake", "-S", str(EXAMPLE), "-B", str(build), *options],
        ["cmake", "--build", str(build)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "predict"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("example"), STRICT)


def a_run(task: str, cell: str, *, tokens: bool = False, **options: Any) -> Run:
    """Return an untrained model."""
    torch.manual_seed(0)
    targets = {"target_names": ("u", "v"), "target_mean": (30.0, 0.1), "target_std": (7.0, 3.0)}
    found: dict[str, Any] = {
        "transcribe": {"labels": ("x", "y")},
        "regress": targets,
        "forecast": {},
        "language": {},
    }
    scale = {} if options.get("loss") == "bce" else {"mean": (1.5, -20.0), "std": (0.3, 7.0)}
    learned = found.get(task, {"labels": ("x", "y", "z")})
    learned |= {"vocabulary": VOCABULARY} if tokens else {"channels": ("a", "b"), **scale}
    preprocessor = Preprocessor(task, per_element=options.pop("per_element", None), **learned)
    answers = {"regress": 2, "forecast": 2, "language": len(VOCABULARY)}.get(task, 3)
    options |= (
        {"input_size": len(VOCABULARY), "embedding": 5}
        if tokens
        else {"input_size": 2, "embedding": None}
    )
    per_element = preprocessor.per_element or task == "transcribe"
    config = ModelConfig(
        task, cell, hidden_size=9, per_element=per_element, output_size=answers, **options
    )
    return Run(SavedModel(SequenceModel(config).eval(), preprocessor, {}))


def inputs_of(run: Run) -> list[Tensor]:
    """Return sequences as the network reads them."""
    rng = np.random.default_rng(0)
    data: list[Any] = [rng.normal([1.5, -20], [0.3, 7], (n, 2)).astype(np.float32) for n in LENGTHS]
    if run.preprocessor.is_tokens:
        data = [[str(word) for word in rng.choice([*"abcdefg?"], n)] for n in LENGTHS]
    elif run.model.is_binary:
        data = [rng.integers(0, 2, (n, 2)).astype(np.float32) for n in LENGTHS]
    prepared: Any = run.preprocessor.apply(run.read(data, need_labels=False), require_targets=False)
    return [prepared[place]["inputs"] for place in range(len(prepared))]


def as_text(inputs: list[Tensor]) -> str:
    """Return sequences as text, a line each."""
    return "".join(
        " ".join(f"{number:.9g}" for number in rows.flatten().tolist()) + "\n" for rows in inputs
    )


def printed(command: list[Any], text: str, **environment: str) -> list[list[float]]:
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [[float(number) for number in line.split()] for line in done.stdout.splitlines()]


TASKS: dict[str, list[dict[str, Any]]] = {
    "classify": [
        {"cell": layer, "tokens": number % 2 == 1, "num_layers": 1 + number % 3, "pooling": pooling}
        | {"bidirectional": pooling in ("final", "max", "first")}
        for number, layer in enumerate(CELLS)
        for pooling in POOLINGS
    ],
    "tag": [{"cell": "lstm", "tokens": True, "bidirectional": True}, {"cell": "gru"}],
    "multilabel": [{"cell": "gru", "pooling": "max"}, {"cell": "sru", "per_element": True}],
    "regress": [{"cell": "lstm", "pooling": "mean"}, {"cell": "qrnn", "per_element": True}],
    "forecast": [{"cell": layer, "num_layers": 2} for layer in CELLS]
    + [{"cell": "gru", "loss": "bce"}, {"cell": "lstm", "loss": "huber"}],
    "language": [{"cell": layer, "tokens": True} for layer in CELLS]
    + [{"cell": "lstm", "tokens": True} | {f"{kind}dropout": 0.2 for kind in DROPOUTS}],
    "transcribe": [{"cell": "lstm", "tokens": True}, {"cell": "gru", "bidirectional": True}],
}


@pytest.mark.parametrize("task", TASKS)
def test_a_program_in_c_tells_what_python_predicts(
    task: str, program: Path, tmp_path: Path
) -> None:
    for number, options in enumerate(TASKS[task]):
        folder = tmp_path / str(number)
        a_run(task, **options).save(folder)
        run = rl.load(folder)
        inputs = inputs_of(run)
        with answering(run.model):
            answers: Any = run.model(rl.Ragged(inputs))
        answers = answers.last(empty=float("nan")) if task == "forecast" else answers
        expected = answers if isinstance(answers, Tensor) else answers.values
        commands: list[list[Any]] = [[program, folder]]
        commands += [[sys.executable, EXAMPLE / "predict.py", folder]] * (
            (task, number) == ("forecast", 0)
        )
        for command in commands:
            rows = torch.tensor(printed(command, as_text(inputs)))
            torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("task", TASKS)
def test_streams_in_c_have_the_bits_of_whole_sequences(
    task: str, program: Path, tmp_path: Path
) -> None:
    """In pieces of random sizes next to each other; the sequences are streamed twice."""
    source = random.Random(0)
    for number, options in enumerate(TASKS[task]):
        if options.get("bidirectional"):
            continue
        a_run(task, **options).save(tmp_path / str(number))
        run = rl.load(tmp_path / str(number))
        inputs = {
            slot: rows for slot, rows in zip((0, 8, 3, 5), inputs_of(run), strict=True) if len(rows)
        }
        left, lines = {slot: [rows, rows] for slot, rows in inputs.items()}, []
        while left:
            slot, count = source.choice([*left]), source.randint(1, 9)
            rows = left[slot].pop(0)
            lines.append(f"{slot} {as_text([rows[:count]])}" + "\n" * (source.random() < 0.2))
            if len(rows) > count:
                left[slot].insert(0, rows[count:])
            elif left[slot]:
                lines.append(f"{slot}\n")
            else:
                del left[slot]
        found = printed([program.with_name("stream"), tmp_path / str(number), "9"], "".join(lines))
        for slot, rows in inputs.items():
            with answering(run.model):
                answers: Any = run.model(
                    rl.Ragged([rows[: count + 1] for count in range(len(rows))])
                )
            expected = answers if isinstance(answers, Tensor) else answers.last()
            own = torch.tensor([row for at, *row in found if at == slot])
            torch.testing.assert_close(own, torch.cat([expected] * 2), rtol=0, atol=0)


def refused(program: Path, folder: Path, text: str = "1 2\n", *more: str) -> str:
    done = subprocess.run([program, folder, *more], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), (text, done)
    return done.stderr


def test_options_that_the_program_lacks_are_refused_by_name(program: Path, tmp_path: Path) -> None:
    options: dict[str, dict[str, Any]] = {
        "attention: this program does not have that pooling": {"pooling": "attention"},
        "logsumexp: this program does not have that pooling": {"pooling": "logsumexp"},
        "slstm: no kernel runs this layer": {"cell": "slstm"},
        "initial_state: ": {"initial_state": "learned"},
        "layer_norm: ": {"layer_norm": True},
        "zoneout: ": {"zoneout": 0.1},
        "tie_weights: ": {"task": "language", "tokens": True, "tie_weights": True},
    }
    for number, (words, changed) in enumerate(options.items()):
        a_run(**{"task": "classify", "cell": "gru", **changed}).save(tmp_path / str(number))
        assert f"error: {words}" in refused(program, tmp_path / str(number))
    a_run("classify", "gru", tokens=True).save(tmp_path / "tokens")
    for text in ("1 9\n", "1 x\n", "nan\n", "1.5"):
        assert ("no number" if "x" in text else "vocabulary") in refused(
            program, tmp_path / "tokens", text
        )
    a_run("classify", "gru").save(tmp_path / "numbers")
    streams = {
        "3 1 2\n": "below SLOTS",
        "-1\n": "below SLOTS",
        "0.5\n": "below SLOTS",
        "0 1\n": "whole elements",
    }
    for text, words in streams.items():
        assert words in refused(program.with_name("stream"), tmp_path / "numbers", text, "3")
    a_run("classify", "gru", bidirectional=True).save(tmp_path / "backwards")
    assert "error: bidirectional: " in refused(
        program.with_name("stream"), tmp_path / "backwards", "", "3"
    )
    assert "usage" in refused(program.with_name("stream"), tmp_path / "numbers", "", "0")
    mistakes = {
        "1 nan\n": "32 bits",
        "1e39 1": "32 bits",
        "1 2 3\n": "whole elements",
        "1 2x": "no number",
    }
    for text, words in mistakes.items():
        assert words in refused(program, tmp_path / "numbers", text)


def changes_of(config: bytes, weights: bytes) -> dict[str, tuple[str, bytes]]:
    """Return files whose sizes, names and offsets contradict each other, by the kind of damage."""
    size = int.from_bytes(weights[:8], "little")
    header, numbers = json.loads(weights[8 : 8 + size]), weights[8 + size :]

    def with_header(changed: dict[str, Any], more: bytes = b"") -> bytes:
        text = json.dumps(header | changed, separators=(",", ":")).encode()
        return len(text).to_bytes(8, "little") + text + numbers + more

    hh, ih = "encoder.recurrent.weight_hh_l0", "encoder.recurrent.weight_ih_l0"
    far = 2**63 - 1
    entries: dict[str, Any] = {
        "another shape": {hh: header[hh] | {"shape": [9, 27]}},
        "no dimensions": {hh: header[hh] | {"shape": []}},
        "a shape beyond 64 bits": {hh: header[hh] | {"shape": [2**62, 2**62, 16]}},
        "places that are not there": {hh: header[hh] | {"data_offsets": [far - 1296, far]}},
        "places the wrong way": {
            hh: header[hh] | {"data_offsets": header[hh]["data_offsets"][::-1]}
        },
        "the same place twice": {ih: header[ih] | {"shape": [27, 5]}, "more": header[hh]},
        "float16": {hh: header[hh] | {"dtype": "F16"}},
        "no object": {hh: 3},
    }
    found = {name: ("weights.safetensors", with_header(entry)) for name, entry in entries.items()}
    found["numbers of no tensor"] = "weights.safetensors", with_header({}, bytes(8))
    found["not finite"] = "weights.safetensors", weights[:-4] + b"\0\0\x80\x7f"
    found["a header beyond the file"] = "weights.safetensors", b"\xff" * 8 + weights[8:]
    for name, (old, new) in {
        "layers beyond all memory": (b'"num_layers": 2', b'"num_layers": 2000000000'),
        "fewer layers": (b'"num_layers": 2', b'"num_layers": 1'),
        "one direction": (b'"bidirectional": true', b'"bidirectional": false'),
        "units beyond 32 bits": (b'"hidden_size": 9', b'"hidden_size": 99999999999999999999'),
        "another number of units": (b'"hidden_size": 9', b'"hidden_size": 18'),
        "another version": (b'"format_version": 3', b'"format_version": 4'),
        "brackets": (b'"categories": []', b'"categories": ' + 100_000 * b"["),
    }.items():
        assert old in config
        found[name] = "config.json", config.replace(old, new)
    return found


def test_spoilt_files_never_end_the_program_but_by_a_line(tmp_path: Path) -> None:
    """With AddressSanitizer and UndefinedBehaviorSanitizer: an answer, or one line and exit status
    2.
    """
    command = ["cc", *SANITIZED.split(), "-x", "c", "-", "-o", str(tmp_path / "nothing")]
    if subprocess.run(
        command, input=b"int main(void) { return 0; }", capture_output=True
    ).returncode:
        pytest.skip("the C compiler has no sanitizers")
    program = built(tmp_path, SANITIZED)
    folder = tmp_path / "model"
    run = a_run("classify", "lstm", num_layers=2, bidirectional=True)
    run.save(folder)
    text = as_text(inputs_of(run))
    whole = {name: (folder / name).read_bytes() for name in ("config.json", "weights.safetensors")}
    options = {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"}
    printed([program, folder], text, **options)

    def ends(name: Any) -> int:
        done = subprocess.run(
            [program, folder], input=text, capture_output=True, text=True, env=os.environ | options
        )
        assert done.returncode in (0, 2), (name, done.returncode, done.stderr[-3000:])
        assert done.stderr.count("\n") == (1 if done.returncode else 0), (name, done.stderr[-3000:])
        for file, content in whole.items():
            (folder / file).write_bytes(content)
        return done.returncode

    for name, change in changes_of(
        **{name.split(".")[0]: content for name, content in whole.items()}
    ).items():
        (folder / change[0]).write_bytes(change[1])
        assert ends(name) == 2, name
    source = random.Random(0)
    for number in range(100):
        file = source.choice([*whole])
        content = bytearray(whole[file])
        if number % 4 == 0:
            del content[source.randrange(len(content)) :]
        else:
            # In the header, because most other bytes may have any value.
            for _ in range(source.choice((1, 1, 3))):
                content[source.randrange(min(len(content), 2400))] = source.choice(
                    (0, 34, 44, 57, 91, 125, 128, 255)
                )
        (folder / file).write_bytes(content)
        ends((number, file))
