"""examples/c: a program in C prints the bits that Python prints, with the library and its header alone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import raglane as rl
import raglane.native
from raglane.data.preprocess import Preprocessor
from raglane.models.run import Run
from raglane.native import missing_kernels
from raglane.training.checkpoint import SavedModel
from raglane.training.model import ModelConfig, SequenceModel, answering

pytestmark = [
    pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels())),
    pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("cc")), reason="needs cmake and a C compiler"),
]

ROOT = Path(__file__).parents[2]
VOCABULARY = ("<unk>", *"abcdefg")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built by its own CMakeLists.txt against what an installation has."""
    prefix, build = tmp_path_factory.mktemp("native"), tmp_path_factory.mktemp("build")
    for source, place in {"csrc/raglane.h": "include", "csrc/cmake/raglaneConfig.cmake": "lib/cmake/raglane"}.items():
        (prefix / place).mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, prefix / place)
    found = [file for folder in raglane.native.__path__ for file in Path(folder, "lib").glob("libraglane_cpu.*")]
    shutil.copy(found[0], prefix / "lib")
    options = [f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_C_FLAGS=-Wall -Wextra -Werror"]
    for command in (
        ["cmake", "-S", str(ROOT / "examples" / "c"), "-B", str(build), *options],
        ["cmake", "--build", str(build)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "predict"


def a_model(layer: str, pooling: str, embedding: int | None, **options: object) -> Run:
    names = () if embedding else ("a", "b")
    preprocessor = Preprocessor("classify", names, vocabulary=VOCABULARY if embedding else None, labels=("x", "y", "z"))
    sizes = {"input_size": len(VOCABULARY) if embedding else 2, "output_size": 3, "hidden": 9, "embedding": embedding}
    config = ModelConfig("classify", layer, pooling=pooling, **sizes, **options)  # type: ignore[arg-type]
    return Run(SavedModel(SequenceModel(config).eval(), preprocessor, {}))


def test_a_program_in_c_prints_what_python_prints(program: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    cells = ("lstm", "gru", "rnn", "indrnn", "sru", "qrnn", "mingru", "minlstm")
    poolings = ("summary", "mean", "max", "last", "first")
    for number, layer in enumerate(cells):
        embedding = 5 if number % 2 else None
        run = a_model(layer, poolings[number % 5], embedding, layers=1 + number % 3, bidirectional=number % 4 < 2)
        lengths = [3, 0, 1, 40]
        folder = tmp_path / layer
        run.save(folder)
        made = [torch.randint(8, (n,)) if embedding else torch.randn(n, 2) for n in lengths]
        text = "".join(" ".join(f"{x:.9g}" for x in part.flatten().tolist()) + "\n" for part in made)
        done = subprocess.run([program, folder], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        with answering(run.model):
            answers = run.model(rl.Ragged(made))
        assert isinstance(answers, torch.Tensor)
        assert done.stdout == "".join(" ".join(f"{x:.9g}" for x in row) + "\n" for row in answers.tolist()), layer


def test_what_the_program_cannot_read_ends_in_one_line(program: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    a_model("gru", "summary", 5).save(folder)
    whole = (folder / "weights.safetensors").read_bytes()
    for text, words in {"1 8\n": "vocabulary", "1 x\n": "no number", "nan\n": "vocabulary"}.items():
        done = subprocess.run([program, folder], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stdout, words in done.stderr) == (2, "", True), (text, done.stderr)
    for count in (0, 5, 100, len(whole) - 1):
        (folder / "weights.safetensors").write_bytes(whole[:count])
        done = subprocess.run([program, folder], input="1 2\n", capture_output=True, text=True)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), (count, done.stderr)
    a_model("gru", "attention", 5).save(tmp_path / "attention")
    done = subprocess.run([program, tmp_path / "attention"], input="1 2\n", capture_output=True, text=True)
    assert "attention: this program does not have that pooling" in done.stderr
