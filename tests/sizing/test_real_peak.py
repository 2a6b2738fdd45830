"""The planned memory of a worker against the real peak of a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

DLRM = """
[model]
dim = 128
[data]
skew = 0.6
[row_optimizer]
kind = "adam"
[train]
steps = 40
[evaluate]
num_samples = 4096
"""
HSTU = """
[data]
kind = "histories"
[histories]
num_items = 100_000
[model]
kind = "hstu"
max_length = 50
num_negatives = 16
[pipeline]
num_micro_batches = 2
[train]
batch_size = 128
steps = 30
[evaluate]
num_samples = 128
"""
TWO_RANKS = """
[model]
dim = 96
[data]
skew = 0.8
[pipeline]
num_micro_batches = 2
[train]
steps = 40
[evaluate]
num_samples = 4096
"""


def nestpipe(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "nestpipe", *map(str, arguments)], check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "ranks"), [(DLRM, 1), (HSTU, 1), (TWO_RANKS, 2)], ids=["dlrm", "hstu", "two-ranks"])
def test_the_plan_is_near_the_real_peak(text: str, ranks: int, tmp_path: Path) -> None:
    """Fails if need.py leaves out the part `store`."""
    recipe, real, planned = (tmp_path / name for name in ("recipe.toml", "real.json", "planned.json"))
    recipe.write_text(text)
    nestpipe("train", recipe, "--ranks", ranks, "--json", real)
    nestpipe("plan", recipe, "--workers", ranks, "--host-memory", 64, "--json", planned)
    peak = json.loads(real.read_text())["peak_rss_bytes"]
    assert json.loads(planned.read_text())["host_bytes"] == pytest.approx(peak, rel=0.15)
