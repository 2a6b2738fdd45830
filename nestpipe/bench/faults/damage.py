"""Damages one checkpoint: flips one bit, cuts a file, or removes one. Knows the layout of the files by itself, as
docs/checkpoints.md describes it."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

_HEADER_BYTES = 64
_BLOCK = struct.Struct("<4sIIIQQ")

FILES = {"manifest": "manifest.json", "part": "rank*.json", "state": "rank*.safetensors", "dense": "dense.safetensors"}
"""Files of each class of damage that has whole files."""
SHARD_PARTS = ("shard-header", "block-header", "keys", "steps", "records", "end")
"""Classes of damage within a shard of rows."""
CLASSES = (*FILES, *SHARD_PARTS)
ROWLESS = ("state", "dense")
"""Classes that no other checkpoint needs, even if it is based on this one."""


@dataclass(frozen=True)
class Damage:
    """What was done to a checkpoint."""

    text: str
    spoils_rows: bool
    """Whether checkpoints that are based on this one are damaged, too."""


def flip_byte(checkpoint: Path, kind: str, random: Random) -> Damage:
    """Changes one byte of a class of files, or of a part of a shard."""
    if kind in FILES:
        file = random.choice(sorted(checkpoint.glob(FILES[kind])))
        places = [range(file.stat().st_size)]
    else:
        candidates = [(file, places) for file in _shards(checkpoint) if (places := _places(file, kind))]
        file, places = random.choice(candidates)
    data = bytearray(file.read_bytes())
    place = random.choice(places)
    while True:
        offset, bits = random.choice(place), 1 << random.randrange(8)
        changed = bytearray(data)
        changed[offset] ^= bits
        if file.suffix != ".json" or not _is_same_json(data, changed):
            break
    file.write_bytes(changed)
    return Damage(f"byte {offset} of {checkpoint.name}/{file.name} ({kind}) was changed", kind not in ROWLESS)


def cut(checkpoint: Path, random: Random) -> Damage:
    """Cuts a file short, as a disk that lied about its syncs may do."""
    file = random.choice(sorted(checkpoint.iterdir()))
    size = random.randrange(file.stat().st_size)
    with file.open("r+b") as opened:
        opened.truncate(size)
    return Damage(f"{checkpoint.name}/{file.name} was cut to {size} bytes", _spoils_rows(file))


def remove(checkpoint: Path, random: Random) -> Damage:
    file = random.choice(sorted(checkpoint.iterdir()))
    file.unlink()
    return Damage(f"{checkpoint.name}/{file.name} was removed", _spoils_rows(file))


def _spoils_rows(file: Path) -> bool:
    return file.suffix != ".safetensors"


def _shards(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*.rows"))


def _places(file: Path, kind: str) -> list[range]:
    """Returns the bytes of one part of a shard, block by block."""
    if kind == "shard-header":
        return [range(_HEADER_BYTES)]
    return [place for part, place in _blocks(file.read_bytes()) if part == kind]


def _blocks(data: bytes) -> Iterator[tuple[str, range]]:
    first = _HEADER_BYTES
    while True:
        kind, _, record_bytes, _, count, num_bytes = _BLOCK.unpack_from(data, first)
        content = first + _HEADER_BYTES
        if kind == b"END ":
            yield "end", range(first, content)
            return
        yield "block-header", range(first, content)
        yield "keys", range(content, content + 8 * count)
        if kind == b"ROWS":
            yield "steps", range(content + 8 * count, content + 16 * count)
            yield "records", range(content + 16 * count, content + (16 + record_bytes) * count)
        first = content + num_bytes


def _is_same_json(before: bytearray, after: bytearray) -> bool:
    """Returns whether a change is one of spaces only, for example."""
    try:
        return bool(json.loads(before) == json.loads(after))
    except ValueError:
        return False
