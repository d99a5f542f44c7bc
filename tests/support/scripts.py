"""Scripts as modules; and code in new processes, forked from an interpreter that has imported what
takes long.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SERVER = """
import json, os, signal, sys, torch, traceback

for line in sys.stdin:
    given = json.loads(line)
    child = os.fork()
    if child == 0:
        signal.alarm(given["seconds"])
        for number in (1, 2):
            os.dup2(os.open(given["printed"][number - 1], os.O_WRONLY), number)
        os.environ.update(given["environment"])
        torch.set_num_threads(2)
        end = 0
        try:
            exec(given["code"], {"__name__": "__main__"})
        except SystemExit as asked:
            end = int(asked.code or 0)
        except BaseException:
            traceback.print_exc()
            end = 1
        sys.stdout.flush()
        os._exit(end)  # a regular exit takes half a second
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def load(path: Path) -> Any:
    """Import a script as a module, without running its main."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Ended:
    """The exit code (minus the number of a signal) and the output of a process."""

    returncode: int
    stdout: str
    stderr: str


class Script:
    """Runs code in new processes with two threads, one after the other, forked after the import of
    a module.
    """

    def __init__(self, module: str = "torch") -> None:
        self._code = f"import {module}\n{_SERVER}"

    def __enter__(self) -> Script:
        self._server: subprocess.Popen[str] | None = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.communicate()

    def __call__(self, code: str, seconds: int = 60, **environment: str) -> Ended:
        """Run code with additional environment variables; an alarm ends it after some seconds."""
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-c", self._code],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "2",
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.NamedTemporaryFile("r") as stdout, tempfile.NamedTemporaryFile("r") as stderr:
            given = {"code": code, "seconds": seconds, "environment": environment}
            self._server.stdin.write(
                json.dumps(given | {"printed": [stdout.name, stderr.name]}) + "\n"
            )
            self._server.stdin.flush()
            return Ended(int(self._server.stdout.readline()), stdout.read(), stderr.read())
