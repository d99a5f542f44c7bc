"""Importing Raglane is cheap: no optional dependency, next to no time."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from scripts import Script

ROOT = Path(__file__).parents[1]
# What is imported under another name than it is installed.
DISTRIBUTIONS = {
    "python_calamine": "python-calamine",
    "onnx_ir": "onnx-ir",
    "sklearn": "scikit-learn",
    "vl_convert": "vl-convert-python",
}

EXTRAS = [
    "pyarrow",
    "pandas",
    "typer",
    "rich",
    "lightning",
    "safetensors",
    "matplotlib",
    "sktime",
    "torch._dynamo",
]


def test_imports_no_extra(script: Script) -> None:
    for name in ("raglane", "raglane.data"):
        done = script(
            f"import sys, {name}; print([name for name in {EXTRAS} if name in sys.modules])"
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_help_and_mistakes_in_options_do_not_import_torch() -> None:
    calls = [["--help"], ["train", "--help"], ["bench", "--help"], ["predict", "runs/a", "--n"]]
    code = f"import sys; from raglane.cli import main; print(*map(main, {calls})); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[-8:]) == (0, "0 0 0 2\n"), done.stderr


def test_layers_and_batches_need_torch_and_numpy_alone(script: Script) -> None:
    done = script(
        "import sys\n"
        "sys.modules |= dict.fromkeys(['pyarrow', 'pandas', 'fsspec', 'safetensors', 'sktime', 'typer', 'rich'])\n"
        "import torch, raglane as rl\n"
        "batch = rl.collate([{'x': torch.ones(2, 3)}, {'x': torch.ones(4, 3)}])['x']\n"
        "print(rl.nn.GRU(3, 5)(batch)[0].lengths.tolist(), rl.Ragged([torch.ones(1)]).lengths.tolist())"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[2, 4] [1]\n", "")


def test_streams_load_no_training_or_data(script: Script) -> None:
    """An engine of modules needs the rooms of layers alone."""
    done = script(
        "import sys, raglane as rl\n"
        "from raglane.streams import Engine\n"
        "Engine(rl.nn.GRU(3, 4).eval(), max_streams=1).open().close()\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('raglane.')}\n"
        "print(sorted(rooms & {'training', 'data', 'runs', 'serve', 'report', 'planner', 'cli'}))"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_a_training_and_a_loaded_run_import_nothing_that_takes_seconds(
    script: Script, tmp_path: Path
) -> None:
    slow = ["lightning", "torch._dynamo", "torch._inductor", "sympy", "matplotlib", "scipy"]
    train = "rl.fit([[0.1, 0.9], [0.8, 0.2]] * 4, ['up', 'down'] * 4, epochs=1, hidden_size=4, optimizer=name)"
    done = script(
        f"import sys, raglane as rl\nfor name in ('adam', 'adamw', 'sgd', 'rmsprop'): {train}\n"
        f"texts, folder = [['a', 'b'], ['b']] * 4, {str(tmp_path / 'run')!r}\n"
        "rl.fit(texts, ['up', 'down'] * 4, epochs=1, hidden_size=4).save(folder)\n"
        "rl.load(folder).predict(texts)\n"
        f"print([name for name in {slow} if name in sys.modules])"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_a_prediction_loads_neither_other_layers_nor_what_trains(
    script: Script, tmp_path: Path
) -> None:
    fit = "rl.fit([['a', 'b'], ['b']] * 4, ['up', 'down'] * 4, epochs=1, hidden_size=4)"
    folder = tmp_path / "run"
    assert script(f"import raglane as rl; {fit}.save({str(folder)!r})").returncode == 0
    unused = [
        "kernels.program.backend",
        "kernels.triton.printer",
        "nn.crf",
        "nn.mixers.block",
        "nn.porting.accelerate",
        "nn.recurrent.cell_layers",
        "nn.transduction.search",
        "training.decoders",
        "training.trainer",
    ]
    done = script(
        f"import sys, raglane as rl; rl.load({str(folder)!r}).predict([['a'], ['b', 'c']])\n"
        f"print([name for name in {unused} if f'raglane.{{name}}' in sys.modules])"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_a_command_imports_no_other_and_walks_no_garbage(script: Script, tmp_path: Path) -> None:
    """Collections while modules are imported would take a fifth of the time to the first row."""
    folder, data = tmp_path / "run", tmp_path / "texts.csv"
    data.write_text("text\nab\nb\n")
    fit = "rl.fit(['ab', 'b'] * 4, ['up', 'down'] * 4, epochs=1, hidden_size=4)"
    assert script(f"import raglane as rl; {fit}.save({str(folder)!r})").returncode == 0
    done = script(
        "import gc, sys; collections = []\n"
        "gc.callbacks.append(lambda phase, about: collections.append(about['generation']))\n"
        f"from raglane.cli import main; main(['predict', {str(folder)!r}, {str(data)!r}, '-q'])\n"
        "others = [f'raglane.cli.{name}' for name in ('bench', 'serve', 'train')]\n"
        "print(gc.isenabled(), collections.count(2), [*filter(sys.modules.get, others)])"
    )
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "True 0 []"


def test_a_large_file_of_texts_is_read_without_pandas(script: Script, tmp_path: Path) -> None:
    path = tmp_path / "texts.csv"
    rows = "".join(f"word{row} of,{'ab'[row % 2]}\n" for row in range(2_000))
    path.write_text(f"text,label\n{rows}")
    done = script(
        f"import sys, raglane as rl; data = rl.data.read({str(path)!r})\n"
        "print(len(data), data[7], 'pandas' in sys.modules)"
    )
    row = "{'inputs': tensor([1669,    1]), 'target': tensor(1), 'index': tensor(7)}"
    assert (done.returncode, done.stdout) == (0, f"2000 {row} False\n"), done.stderr


def test_every_public_name_loads(script: Script) -> None:
    done = script(
        "import raglane as rl; [getattr(rl.data, name) for name in rl.data.__all__]; print(rl.data.collate)"
    )
    assert (done.returncode, done.stdout[:17]) == (0, "<function collate"), done.stderr


def test_unknown_names_are_refused(script: Script) -> None:
    done = script("import raglane.data; raglane.data.nothing")
    assert done.returncode == 1
    assert "has no attribute 'nothing'" in done.stderr


def test_an_extra_brings_what_its_message_promises() -> None:
    """``require(module, extra)`` names the extra that installs a missing module."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    brought = {
        name: {re.split(r"[\[>=<]", each)[0] for each in listed} for name, listed in extras.items()
    }
    calls = {
        call
        for path in (ROOT / "src").rglob("*.py")
        if path.name != "messages.py"
        for call in re.findall(r'require\("([\w.]+)", "(\w+)"\)', path.read_text())
    }
    assert len(calls) > 10
    for module, extra in calls:
        package = module.split(".")[0]
        assert DISTRIBUTIONS.get(package, package) in brought[extra], (module, extra)


def test_modules_that_the_pages_name_are_attributes_at_once(script: Script) -> None:
    names = ("cells", "schedules", "training")
    done = script(f"import raglane as rl; print([getattr(rl, name).__name__ for name in {names}])")
    assert done.stdout == "['raglane.cells', 'raglane.schedules', 'raglane.training']\n"
