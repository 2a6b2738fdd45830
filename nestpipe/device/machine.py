"""Names the processor and the accelerator of this machine."""

import platform
import subprocess
from pathlib import Path

import torch


def cpu_name() -> str:
    """Returns the name of the processor, as the kernel reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def accelerator() -> dict[str, str | None]:
    """Describes the accelerator of this machine, whether or not it is used; without one, returns an empty dict."""
    if not torch.accelerator.is_available():
        return {}
    count, is_cuda = torch.accelerator.device_count(), torch.cuda.is_available()
    name = torch.cuda.get_device_name(0) if is_cuda else torch.accelerator.current_accelerator()
    return {
        "accelerator": f"{count} x {name}" if count > 1 else str(name),
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
    }


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
