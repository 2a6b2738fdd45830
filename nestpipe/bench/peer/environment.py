"""The environment that has TorchRec. It is made on first use, and never a dependency of nestpipe."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

TORCH = "torch==2.13.0"
PACKAGES = (
    *("torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0", "tensordict==0.15.3", "pyvers==0.2.3", "torchmetrics==1.0.3"),
    *("lightning-utilities", "pyre-extensions==0.0.32", "typing-inspect", "mypy-extensions", "cloudpickle"),
    *("packaging", "tqdm", "numpy"),
)
"""Installed without dependencies: those that torchrec asks for are the builds for CUDA, several gigabytes."""
_MADE = "made-by-nestpipe"


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nestpipe" / "torchrec-1.8.0"


def find_or_make(folder: Path, say: Callable[[str], None]) -> Path:
    """Returns the Python of the environment. say: called with a line before something that takes long."""
    python = folder / "bin" / "python"
    if (folder / _MADE).exists():
        return python
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not an environment of this benchmark; remove it, or name another with --env")
    say(f"making an environment with TorchRec in {folder}: this takes minutes, once")
    try:
        _do([sys.executable, "-m", "venv", str(folder)])
        _do([str(python), "-m", "pip", "install", "--quiet", TORCH])
        _do([str(python), "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES])
        _do([str(python), "-c", "import torchrec, torchrec.distributed.train_pipeline"])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # the next run begins anew
        raise
    (folder / _MADE).touch()
    return python


def _do(command: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
