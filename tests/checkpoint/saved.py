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
    return file.read_bytes() if file.suffix != ".rows" else _without_save_id(file)


def _without_save_id(shard: Path) -> bytes:
    """Returns the bytes of a shard without the id, and the checksums of headers, which depend on it."""
    data = bytearray(shard.read_bytes())
    data[24:40] = bytes(16)
    for place in headers_of(shard):
        data[place + HEADER_BYTES - 4 : place + HEADER_BYTES] = bytes(4)
    return bytes(data)


def headers_of(shard: Path) -> list[int]:
    """Returns where the headers of a shard begin: its own, those of its blocks, and the end."""
    data, places = shard.read_bytes(), [0, HEADER_BYTES]
    while places[-1] < len(data) - HEADER_BYTES:
        num_bytes = int.from_bytes(data[places[-1] + 24 : places[-1] + 32], "little")
        places.append(places[-1] + HEADER_BYTES + num_bytes)
    return places


def shards_of(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*.rows"))


def flip(file: Path, place: int) -> None:
    """Flips one bit of a file."""
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
