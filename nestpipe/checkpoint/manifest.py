"""The manifest of a checkpoint, and the part of each rank: which files belong to it, and their checksums.

The manifest is written last. It has its own checksum, and that of each rank's part; a part names the rank's shards.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestpipe.checkpoint.errors import DamagedError

MANIFEST = "manifest.json"
FORMAT = 3
"""Written by this version. Formats 1 and 2, of version 0.1 and of an early 0.2, are read as well."""
REPLICAS_FORMAT = 4
"""Written if there are several sharding groups, of which the first one has saved the rows. Versions that would look for
them on all ranks refuse it. Once read, it is FORMAT."""


def sealed(content: Mapping[str, Any]) -> str:
    """Returns the text of a manifest or a part, with a checksum of its content."""
    content = json.loads(json.dumps(content))  # as a reader sees it: keys are strings, for example
    return json.dumps({**content, "checksum": _checksum(content)}, indent=2)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / MANIFEST
    if not file.exists():
        previous = checkpoint.with_name(f"{checkpoint.name}.previous")  # version 0.1 left the save before it there
        hint = f"; {previous} holds the save before it" if previous.exists() else ""
        raise DamagedError(f"{file} does not exist: {checkpoint} is not a complete checkpoint{hint}")
    manifest = _read_json(file)
    if not isinstance(manifest.get("checksums"), dict):
        raise DamagedError(f"{file} is not the manifest of a checkpoint")
    if manifest.get("format") not in (1, 2):  # those have no checksum of their own
        _check_seal(file, manifest)
    if manifest.get("format") == REPLICAS_FORMAT:
        manifest["format"] = FORMAT
    return manifest


def num_shards_of(manifest: Mapping[str, Any]) -> int:
    """Returns the number of ranks among which the rows of a checkpoint are sharded: its first ones."""
    return int(manifest.get("num_shards", manifest["world_size"]))


@dataclass(frozen=True)
class Part:
    """One rank's part of a checkpoint."""

    rank: int
    content: Mapping[str, Any]

    @property
    def sizes(self) -> dict[str, int | None]:
        """Returns the size of each of the rank's files."""
        return {state_name(self.rank): self.content["state"][1], **self.shard_sizes}

    @property
    def shard_sizes(self) -> dict[str, int]:
        return {name: int(shard["bytes"]) for name, shard in self.content["shards"].items()}


def part_name(rank: int) -> str:
    return f"rank{rank:05d}.json"


def state_name(rank: int) -> str:
    """Returns the name of the file with what a rank has of its own: where its data continues, for example."""
    return f"rank{rank:05d}.safetensors"


def read_parts(checkpoint: Path, manifest: Mapping[str, Any]) -> Iterator[Part]:
    """Reads the ranks' parts, one after the other; none for the old formats."""
    for rank in range(manifest["world_size"] if manifest["format"] == FORMAT else 0):
        yield read_part(checkpoint, manifest, rank)


def read_part(checkpoint: Path, manifest: Mapping[str, Any], rank: int) -> Part:
    file = checkpoint / part_name(rank)
    content = _read_json(file)
    _check_seal(file, content)
    if content["checksum"] != manifest["checksums"].get(file.name):
        raise DamagedError(f"{file} is damaged or of another save: its checksum is not that of the manifest")
    return Part(rank, content)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise DamagedError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{file} is damaged: {type(error).__name__}: {error}") from None
    if not isinstance(content, dict):
        raise DamagedError(f"{file} is not the manifest of a checkpoint")
    return content


def _check_seal(file: Path, content: Mapping[str, Any]) -> None:
    rest = {name: value for name, value in content.items() if name != "checksum"}
    if content.get("checksum") != _checksum(rest):
        raise DamagedError(f"{file} is damaged: its checksum is wrong")


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
