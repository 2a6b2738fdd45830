"""The files of saved checkpoints: what is in them, and how to change them."""

import json
from pathlib import Path
from typing import Any

from nestpipe.checkpoint.folder import LOCK, MARKER
from nestpipe.checkpoint.manifest import MANIFEST, sealed

SHARD, PART, STATE = "rank00000-shard000.rows", "rank00000.json", "rank00000.safetensors"
DENSE = "dense.safetensors"
OWN_FILES = [MARKER, LOCK]
"""What a folder of checkpoints has besides them."""
HEADER_BYTES = 64


def edit(file: Path, **values: Any) -> None:
    """Changes entries of a manifest or a part, and makes its checksum right."""
    content = json.loads(file.read_text())
    content.pop("checksum", None)
    file.write_text(sealed(content | values))


def edit_manifest(checkpoint: Path, **values: Any) -> None:
    edit(checkpoint / MANIFEST, **values)


def content_of(checkpoint: Path) -> dict[str, Any]:
    """Returns the content of each file, without the save's id: that of two equal saves is equal."""
    return {file.name: _content(file) for file in sorted(checkpoint.iterdir())}


def _content(file: Path) -> Any:
    if file.suffix == ".json":
        hidden = ("save_id", "checksum", "checksums")
        return {name: value for name, value in json.loads(file.read_text()).items() if name not in hidden}
    return file.read_bytes()[HEADER_BYTES if file.suffix == ".rows" else 0 :]


def shards_of(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*.rows"))


def flip(file: Path, place: int) -> None:
    """Flips one bit of a file."""
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
