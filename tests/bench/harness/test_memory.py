"""Memory of a command, with all processes that it starts."""

import sys

import pytest

from nestpipe.bench.harness.memory import peak_of_command

HOLD = "import time; held = bytearray(b'x') * 60_000_000; time.sleep(0.5)"
BOTH = f"import subprocess, sys; held = bytearray(b'x') * 60_000_000; subprocess.run([sys.executable, '-c', {HOLD!r}])"


def test_child_processes_count() -> None:
    """Fails if tree_bytes leaves out the children."""
    assert 60e6 < peak_of_command([sys.executable, "-c", HOLD]) < 110e6
    assert 120e6 < peak_of_command([sys.executable, "-c", BOTH]) < 200e6


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="ended with 3: sorry"):
        peak_of_command([sys.executable, "-c", "print('sorry'); raise SystemExit(3)"])
