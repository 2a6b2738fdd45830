"""Builds the native library into the package, for wheels and editable installs."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "nestpipe/store/native/libnestpipe.so"


class NativeBuildHook(BuildHookInterface):
    def dependencies(self) -> list[str]:
        return [] if shutil.which("cmake") else ["cmake"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        # An editable install builds where `make native` does, which then has nothing left to do.
        build = root / "build" / ("native" if version == "editable" else "wheel")
        subprocess.run(["cmake", "-S", str(root), "-B", str(build)], check=True)
        subprocess.run(["cmake", "--build", str(build), "--parallel", str(os.cpu_count() or 1)], check=True)
        build_data["artifacts"].append(LIBRARY)
        # The library links neither Python nor torch, so one wheel serves every Python 3 of the platform.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False
