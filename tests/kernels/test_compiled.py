"""Tests the machine code of the kernels for an accelerator, which can be compiled without one.

The interpreter accepts more than the compiler does, never fuses operations, and runs programs one after another.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLED_SOFTMAX = ("place", "softmax", "gradients")
WHOLE_NUMBERS = ("mark", "list", "number", "describe", "count", "piece")


def check_sampled_softmax(codes: dict[str, str]) -> None:
    """Checks the sampled softmax, where the logarithm may use fused operations."""
    assert len(codes) == 4
    for kernel, code in codes.items():
        assert not re.search(r"\b(atom|red)\.", code), f"{kernel} uses atomic operations"
        for instruction in ("ld", "st"):
            assert re.search(rf"{instruction}\.global\.(v4\.b32|v2\.b64)", code), f"{kernel} is narrow"
        divides, roots = (set(re.findall(rf"\b{name}\.\S+", code)) for name in ("div", "sqrt"))
        assert all(".rn." in instruction for instruction in divides | roots), f"{kernel} does not round as IEEE does"


def check_whole_numbers(codes: dict[str, str]) -> None:
    """Checks the kernels that make plans of keys and of segments. They write every place once."""
    assert len(codes) == 6
    for kernel, code in codes.items():
        assert not re.search(r"\b(atom|red|div|rem)\.", code), f"{kernel} uses atomic operations or divides"


def taken(codes: dict[str, str], kernels: tuple[str, ...]) -> dict[str, str]:
    return {kernel: codes.pop(kernel) for kernel in [*codes] if kernel.split("_")[0] in kernels}


@pytest.mark.slow
def test_machine_code(tmp_path: Path) -> None:
    """Fails if fused multiply-add is not switched off, divide is the operator, root is tl.sqrt, rowwise_adagrad has no
    barrier, VECTOR is 1, or mark_kernel writes is_first_use by tl.atomic_xchg."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.kernels.compiled"]
    root = Path(__file__).parents[2]
    finished = subprocess.run(command, cwd=root, env=environment, timeout=55, stdout=subprocess.PIPE, check=True)
    codes = json.loads(finished.stdout)
    check_sampled_softmax(taken(codes, SAMPLED_SOFTMAX))
    check_whole_numbers(taken(codes, WHOLE_NUMBERS))
    assert len(codes) == 14
    for kernel, code in codes.items():
        assert not re.search(r"\b(fma|atom|red)\.", code), f"{kernel} uses fused or atomic operations"
        wide = "v4.b32" if kernel.endswith("fp32") else "v2.b64"
        for instruction in ("ld.global", "st.global"):
            assert f"{instruction}.{wide}" in code, f"{kernel} has narrow loads or stores only"
        divides, roots = (set(re.findall(rf"\b{name}\.\S+", code)) for name in ("div", "sqrt"))
        assert all(".rn." in instruction for instruction in divides | roots), f"{kernel} does not round as IEEE does"
        assert bool(divides) == bool(roots) == ("ada" in kernel)
        if "rowwise" in kernel:
            state_read = code.index(f"ld.global.{wide[3:]}")
            assert state_read < code.rindex("bar.sync") < code.index("st.global")
