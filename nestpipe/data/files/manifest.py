"""The manifest of a prepared folder, which describes its files and proves that it is finished."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MANIFEST = "manifest.json"
FORMAT = "nestpipe-data"
VERSION = 1

Kind = Literal["histories", "clicks"]


@dataclass(frozen=True)
class PreparedFile:
    name: str
    split: str
    """One of all, train, validation, test; or index, for the original numbers of users and items."""
    num_rows: int
    num_bytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        names = {"name": self.name, "split": self.split}
        return names | {"rows": self.num_rows, "bytes": self.num_bytes, "sha256": self.sha256}


@dataclass(frozen=True)
class Manifest:
    kind: Kind
    source: str
    schema: Mapping[str, str]
    """Arrow type of each column of the files that are trained on."""
    counts: Mapping[str, int]
    files: Sequence[PreparedFile]
    inputs: Mapping[str, int]
    """Bytes of each published file, in the order in which they were read."""
    command: Sequence[str]
    """The command without its folders, which may have other names when it is called again."""

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            "source": self.source,
            "schema": dict(self.schema),
            "counts": dict(self.counts),
            "files": [file.to_json() for file in self.files],
            "inputs": [{"name": name, "bytes": num_bytes} for name, num_bytes in self.inputs.items()],
            "command": list(self.command),
        }

    def checksum(self) -> str:
        """Returns the SHA-256 of the canonical JSON, which is equal exactly if the folders are."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Writes all of the manifest or, if the process is killed, nothing."""
        unfinished = folder / f"{MANIFEST}.unfinished"
        with unfinished.open("w") as file:
            file.write(json.dumps(self.to_json(), indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a finished folder; raises a ValueError for any other."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise ValueError(
                f"{path} is of version {content['version']}, this program knows {VERSION}; prepare it again"
            )
        files = [PreparedFile(f["name"], f["split"], f["rows"], f["bytes"], f["sha256"]) for f in content["files"]]
        inputs = {entry["name"]: entry["bytes"] for entry in content["inputs"]}
        named = content["kind"], content["source"], content["schema"], content["counts"]
        return Manifest(*named, files, inputs, content["command"])
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {MANIFEST}: it is not a folder of `nestpipe data prepare`, or not finished"
        ) from None
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a manifest of `nestpipe data prepare`: {error!r}") from None


def describe_file(path: Path, split: str, num_rows: int) -> PreparedFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return PreparedFile(path.name, split, num_rows, path.stat().st_size, digest)
