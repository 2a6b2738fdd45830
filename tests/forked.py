"""Runs a command in a process that was forked from one that has imported everything: it starts in 0.1 s, not in 3 s."""

import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tests.ranks import _CONTEXT


def run_forked(function: Callable[..., Any], *arguments: Any, timeout: float = 50.0) -> CompletedProcess[str]:
    """Calls a function of a module in a process of its own; returns its exit code and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder) / "out", Path(folder) / "err"
        process = _CONTEXT.Process(target=_call, args=(paths, function, arguments))
        process.start()
        try:
            process.join(timeout)
            assert process.exitcode is not None, f"it runs for more than {timeout} s"
        finally:
            process.kill()
            process.join()
        out, err = (path.read_text() for path in paths)
    return CompletedProcess((function, arguments), process.exitcode, out, err)


def nestpipe(*arguments: str) -> CompletedProcess[str]:
    """Runs `python -m nestpipe` with these arguments. It must not start ranks."""
    return run_forked(_nestpipe, *arguments, timeout=120.0)


def run_script(path: Path) -> CompletedProcess[str]:
    """Runs `python path`."""
    return run_forked(_run_script, path)


def _call(paths: tuple[Path, Path], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    for number, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    try:
        function(*arguments)
    finally:
        sys.stdout.flush()  # the process ends without an exit of the interpreter
        sys.stderr.flush()


def _nestpipe(*arguments: str) -> None:
    sys.argv = ["nestpipe", *arguments]
    runpy.run_module("nestpipe", run_name="__main__")


def _run_script(path: Path) -> None:
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path)]
    runpy.run_path(str(path), run_name="__main__")
