"""A folder that `nestpipe data prepare` wrote: its manifest, and its samples."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestpipe.data.negatives import Negatives
from nestpipe.data.parquet import ParquetData
from nestpipe.data.row_files import BadDataError
from nestpipe.data.schema import Schema
from nestpipe.data.user_histories import UserHistories

MANIFEST = "manifest.json"
FORMAT, VERSION = "nestpipe-data", 1
KINDS = ("histories", "clicks")
NUM_DENSE, NUM_FIELDS = 13, 26
CLICK_FEATURES = tuple(f"key_{number}" for number in range(NUM_FIELDS))
CLICKS = Schema(
    keys=CLICK_FEATURES,
    inputs={"dense": tuple(f"dense_{number}" for number in range(NUM_DENSE))},
    labels={"click": "label"},
)


@dataclass(frozen=True)
class Prepared:
    folder: Path
    kind: str
    source: str
    counts: dict[str, int]
    files: dict[str, tuple[Path, ...]]
    """by split"""

    def split(self, name: str) -> tuple[Path, ...]:
        if not self.files.get(name):
            raise BadDataError(f"{self.folder} has no files of the split {name!r}; it has {', '.join(self.files)}")
        return self.files[name]

    @property
    def num_items(self) -> int:
        """Items are 0 .. num_items - 1."""
        return self.counts["items"]

    def clicks(self, split: str, **options: Any) -> ParquetData:
        """Options are those of ParquetData."""
        return ParquetData(self.split(split), CLICKS, **options)

    def users(self, **options: Any) -> ParquetData:
        """Whole histories, one row for each user."""
        schema = Schema(keys=("item", "time_seconds"), num_keys={"item": self.num_items})
        return ParquetData(self.split("all"), schema, **options)

    def histories(
        self,
        part: str,
        max_length: int,
        crop: str = "last",
        negatives: Negatives | None = None,
        **options: Any,
    ) -> UserHistories:
        return UserHistories(self.users(**options), max_length, part, crop, options.get("seed", 0), negatives)


def read_prepared(folder: str | Path) -> Prepared:
    """Files must be there and as large as the manifest says; checksums are not computed again."""
    folder = Path(folder)
    path = folder / MANIFEST
    if not folder.is_dir():
        raise BadDataError(f"there is no folder {folder}; `nestpipe data prepare` writes one")
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BadDataError(
            f"{folder} has no {MANIFEST}: it is not finished, or no prepared data; run `nestpipe data prepare` again"
        ) from None
    except ValueError as error:
        raise BadDataError(f"{path} is not JSON: {error}; prepare the data again") from None
    try:
        return _checked(folder, manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise BadDataError(f"{path} is not a manifest of prepared data: {error!r}; prepare the data again") from None


def _checked(folder: Path, manifest: dict[str, Any]) -> Prepared:
    found = (manifest["format"], manifest["version"])
    if found != (FORMAT, VERSION) or manifest["kind"] not in KINDS:
        raise BadDataError(
            f"{folder} is of format {found[0]!r}, version {found[1]}, kind {manifest['kind']!r}; this version reads "
            f"{FORMAT!r}, version {VERSION}, kinds {', '.join(KINDS)}"
        )
    files: dict[str, list[Path]] = {}
    for entry in manifest["files"]:
        path = folder / entry["name"]
        num_bytes = path.stat().st_size if path.is_file() else None
        if num_bytes != entry["bytes"]:
            what = "missing" if num_bytes is None else f"{num_bytes} bytes long"
            raise BadDataError(f"{path} is {what}, its manifest says {entry['bytes']} bytes; prepare the data again")
        if entry.get("split") is not None:
            files.setdefault(entry["split"], []).append(path)
    splits = {split: tuple(paths) for split, paths in files.items()}
    return Prepared(folder, manifest["kind"], manifest["source"], dict(manifest["counts"]), splits)
