"""Importing Raglane is cheap: no optional dependency, next to no time."""

from __future__ import annotations

import subprocess
import sys

EXTRAS = ["pyarrow", "pandas", "typer", "rich", "lightning", "safetensors", "matplotlib", "sktime", "torch._dynamo"]


def test_imports_no_extra() -> None:
    code = f"import sys, raglane; print([name for name in {EXTRAS} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_every_public_name_loads() -> None:
    code = "import raglane as rl; [getattr(rl.data, name) for name in rl.data.__all__]; print(rl.data.collate)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("<function collate")


def test_unknown_names_are_refused() -> None:
    code = "import raglane.data; raglane.data.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "has no attribute 'nothing'" in done.stderr
