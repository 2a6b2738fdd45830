"""A folder that `nestpipe data prepare` wrote, and the samples in it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestpipe.data.files.manifest import Manifest, read_manifest
from nestpipe.data.files.parquet import ParquetData
from nestpipe.data.files.row_files import BadDataError
from nestpipe.data.files.schema import Schema
from nestpipe.data.files.user_histories import UserHistories
from nestpipe.data.negatives import Negatives

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
    manifest: Manifest

    def split(self, name: str) -> tuple[Path, ...]:
        """Returns the files of a split."""
        files = self.manifest.files
        paths = tuple(self.folder / file.name for file in files if file.split == name)
        if not paths:
            splits = ", ".join(sorted({file.split for file in files}))
            raise BadDataError(f"{self.folder} has no files of the split {name!r}; it has {splits}")
        return paths

    @property
    def num_items(self) -> int:
        """Number of items, which are 0 .. num_items - 1."""
        return self.manifest.counts["items"]

    def clicks(self, split: str, **options: Any) -> ParquetData:
        """Returns the clicks of a split. options: those of ParquetData."""
        return ParquetData(self.split(split), CLICKS, **options)

    def users(self, **options: Any) -> ParquetData:
        """Returns whole histories, one row for each user. options: those of ParquetData."""
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
    """Opens a prepared folder. Checks that files have the sizes in the manifest, but not their checksums."""
    folder = Path(folder)
    if not folder.is_dir():
        raise BadDataError(f"there is no folder {folder}; `nestpipe data prepare` makes one")
    manifest = read_manifest(folder)
    for file in manifest.files:
        path = folder / file.name
        num_bytes = path.stat().st_size if path.is_file() else None
        if num_bytes != file.num_bytes:
            what = "missing" if num_bytes is None else f"{num_bytes} bytes long"
            raise BadDataError(f"{path} is {what}, its manifest says {file.num_bytes} bytes; prepare the data again")
    if manifest.kind == "histories" and manifest.counts.get("items", 0) < 1:
        raise BadDataError(f"{folder} has no items; the filter may have left nothing of the published files")
    return Prepared(folder, manifest)
