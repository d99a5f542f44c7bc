"""Importing Raglane is cheap: no optional dependency, next to no time."""

from __future__ import annotations

from scripts import Script

EXTRAS = ["pyarrow", "pandas", "typer", "rich", "lightning", "safetensors", "matplotlib", "sktime", "torch._dynamo"]


def test_imports_no_extra(script: Script) -> None:
    for name in ("raglane", "raglane.data"):
        done = script(f"import sys, {name}; print([name for name in {EXTRAS} if name in sys.modules])")
        assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_every_public_name_loads(script: Script) -> None:
    done = script("import raglane as rl; [getattr(rl.data, name) for name in rl.data.__all__]; print(rl.data.collate)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("<function collate")


def test_unknown_names_are_refused(script: Script) -> None:
    done = script("import raglane.data; raglane.data.nothing")
    assert done.returncode == 1
    assert "has no attribute 'nothing'" in done.stderr
