"""A save that is under way.

All ranks begin a save together, at a step boundary, and finish it together. In between, a thread of each rank writes
while training goes on. When the threads of all ranks are done, rank 0 makes the checkpoint visible by one rename.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

from nestpipe.checkpoint import folder
from nestpipe.checkpoint.agree import agree
from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.lock import FolderLock
from nestpipe.checkpoint.manifest import FORMAT, MANIFEST, REPLICAS_FORMAT, part_name, read_manifest, sealed, state_name
from nestpipe.checkpoint.match import describe_dense, describe_tables
from nestpipe.checkpoint.row_writer import RowWriter
from nestpipe.checkpoint.state_file import EncodedState, encode, write_state
from nestpipe.checkpoint.subject import Subject, random_state

DENSE = "dense.safetensors"


@dataclass(frozen=True)
class SaveOptions:
    """How to save."""

    keep: int = 1
    """Checkpoints that stay, the new one included. Bases that they need stay, too."""
    complete_every: int = 1
    """One in this number of saves is complete; the others have only what has changed since the one before."""
    replaces_newer: bool = False
    """Whether checkpoints of more steps than this one may be removed."""
    damaged: tuple[folder.DamagedCheckpoint, ...] = ()
    """Checkpoints that a load has found to be damaged. They are renamed, and do not count."""


@dataclass(frozen=True)
class Base:
    """The checkpoint that the next one may be based on."""

    path: Path
    save_id: str
    num_since_complete: int


class Save:
    """A save under way: made on all ranks at a step boundary, ended by `finish` on all ranks."""

    def __init__(
        self,
        subject: Subject,
        path: Path,
        extra: Mapping[str, Any],
        options: SaveOptions,
        base: Base | None,
        is_locked: bool,
    ) -> None:
        """is_locked: whether this process holds the lock of the folder already."""
        self.path, self.what = path, f"saving to {path}"
        self._is_locked = is_locked
        self._lock: FolderLock | None = None
        self._subject, self._options = subject, options
        self._world = subject.world
        self._data_digest = ""
        self._dense, self._own = self._collect(dict(extra))
        began = json.loads(agree(self._world, lambda: self._begin(base), self.what, only_rank=0)[0])
        self.save_id: str = began["save_id"]
        self.base = base if began["has_base"] else None
        self._staging = Path(began["staging"])
        self._rows: RowWriter | None = None
        try:
            agree(self._world, self._begin_rows, self.what)
        except BaseException:
            self._give_up()
            raise
        self._written: Future[None] = Future()
        self._is_awaited = Event()
        Thread(target=self._write, name="save", daemon=True).start()

    @property
    def is_on_rank_0(self) -> bool:
        return self._world.rank == 0

    @property
    def num_waits(self) -> int:
        """Times that training has waited for the save so far."""
        return 0 if self._rows is None else self._rows.num_waits

    def finish(self) -> Base:
        """Waits until all ranks have written, and makes the checkpoint visible."""
        self._is_awaited.set()
        try:
            try:
                self._world.watch.wait(self._written, self.what, is_remote=False)
            except Exception:  # raised by agree, on all ranks
                if self._world.watch.failure is not None:
                    raise
            agree(self._world, lambda: self._written.result() or "", self.what)
            path = Path(agree(self._world, self._publish, self.what, only_rank=0)[0])
            return Base(path, self.save_id, 0 if self.base is None else self.base.num_since_complete + 1)
        except CheckpointError:
            self._give_up()
            raise
        finally:
            self._unlock()

    def _give_up(self) -> None:
        if self._rows is not None:
            self._rows.end()
        if self._world.rank == 0:
            folder.discard(self._staging)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _collect(self, extra: dict[str, Any]) -> tuple[EncodedState, EncodedState]:
        """Copies the dense part. Refuses what could not be loaded again, before anything is written."""
        subject, encoded = self._subject, {}

        def collect() -> str:
            dense = {**subject.dense_state(), "extra": extra}
            encoded["dense"] = encode(dense, "the saved state")
            encoded["model"] = encode(subject.buffers_and_extra_state(), "the model's state")
            return digest_of(encoded["model"])

        is_own = len(set(agree(self._world, collect, self.what))) > 1  # BatchNorm's statistics, for example

        def collect_own() -> str:
            self._data_digest = digest_of(encode(subject.data_state, "the state of the data"))
            own = {"data": subject.data_state, "random": random_state(self._world.device)}
            own |= {"model": subject.buffers_and_extra_state()} if is_own else {}
            encoded["own"] = encode(own, "this rank's state")
            return ""

        agree(self._world, collect_own, self.what)
        return encoded["dense"], encoded["own"]

    def _begin(self, base: Base | None) -> str:
        """Makes the folder, on rank 0."""
        folder.claim(self.path)
        self._lock = None if self._is_locked else FolderLock(self.path)
        try:
            return self._make_staging(base)
        except BaseException:
            self._unlock()
            raise

    def _make_staging(self, base: Base | None) -> str:
        damaged = self._options.damaged
        complete = folder.checkpoints(self.path)
        complete = [checkpoint for checkpoint in complete if not any(d.is_at(checkpoint) for d in damaged)]
        newer = [checkpoint for checkpoint in complete if _steps_of(checkpoint) > self._subject.num_steps]
        if newer and not self._options.replaces_newer:
            raise CheckpointError(
                f"{newer[-1]} is a checkpoint of {_steps_of(newer[-1])} steps, this trainer is at step "
                f"{self._subject.num_steps} and would replace it; load it first, save to another folder, or call "
                "save(..., replaces_newer=True)"
            )
        staging = folder.begin(self.path, self._subject.num_steps, damaged)
        has_base = base is not None and base.path in complete and read_manifest(base.path)["save_id"] == base.save_id
        return json.dumps({"staging": str(staging), "save_id": secrets.token_hex(16), "has_base": has_base})

    def _begin_rows(self) -> str:
        mesh = self._world.mesh
        if mesh.replica > 0:  # the first sharding group writes the rows
            return ""
        subject, save_id = self._subject, bytes.fromhex(self.save_id)
        tables = [table.name for table in subject.tables]
        place = self._staging, mesh.shard, mesh.num_shards
        self._rows = RowWriter(subject.store, tables, *place, save_id, changed_only=self.base is not None)
        return ""

    def _write(self) -> None:
        """Writes this rank's files. Runs in a thread of its own."""
        error: BaseException | None = None
        try:
            self._write_files()
        except BaseException as raised:  # raised by `finish`
            error = raised
        self._world.notice.num_saves_written += 1  # before `finish` returns: the next save begins to count there
        if error is None:
            self._written.set_result(None)
        else:
            self._written.set_exception(error)

    def _write_files(self) -> None:
        rank, shards = self._world.rank, {} if self._rows is None else self._rows.write(self._is_awaited)
        if rank == 0:
            dense = write_state(self._staging / DENSE, self._dense)
        part = {
            "save_id": self.save_id,
            "data": self._data_digest,
            "state": write_state(self._staging / state_name(rank), self._own),
            "dense": dense if rank == 0 else None,
            "shards": {
                name: {
                    "bytes": content.num_bytes,
                    "buckets": [buckets.start, buckets.stop],
                    "rows": dict(content.rows),
                    "erased": dict(content.erased),
                }
                for name, (buckets, content) in shards.items()
            },
        }
        self._dense, self._own = EncodedState({}, ""), EncodedState({}, "")  # frees the memory
        folder.write_synced(self._staging / part_name(rank), sealed(part))

    def _publish(self) -> str:
        """Writes the manifest and makes the checkpoint visible, on rank 0."""
        subject = self._subject
        parts = {part_name(rank): self._staging / part_name(rank) for rank in range(self._world.size)}
        contents = {name: json.loads(file.read_text()) for name, file in parts.items()}
        dense_checksum, dense_bytes = contents[part_name(0)]["dense"]
        manifest = {
            "format": FORMAT if self._world.mesh.num_replicas == 1 else REPLICAS_FORMAT,
            "save_id": self.save_id,
            "base": None if self.base is None else {"name": self.base.path.name, "save_id": self.base.save_id},
            "world_size": self._world.size,
            "num_shards": self._world.mesh.num_shards,
            "num_steps": subject.num_steps,
            "num_skipped": subject.num_skipped,
            "num_micro_batches": subject.num_micro_batches,
            "hosts": None if self._world.host_map is None else str(self._world.host_map),
            "data_is_equal": len({content["data"] for content in contents.values()}) == 1,
            "seed": subject.seed,
            "tables": describe_tables(subject.tables, subject.seed),
            "dense": describe_dense(subject.model, subject.optimizer, subject.lr_schedule),
            "recipe": subject.recipe,
            "places": subject.places,
            "checksums": {DENSE: dense_checksum} | {name: content["checksum"] for name, content in contents.items()},
            "sizes": {DENSE: dense_bytes} | {name: file.stat().st_size for name, file in parts.items()},
        }
        folder.write_synced(self._staging / MANIFEST, sealed(manifest))
        return str(folder.publish(self._staging))


def digest_of(state: EncodedState) -> str:
    """Returns a hash of a state. Equal states hash equally."""
    sha = hashlib.sha256(state.structure.encode())
    for name in sorted(state.tensors):
        sha.update(name.encode())
        sha.update(state.tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _steps_of(checkpoint: Path) -> int:
    try:
        return int(read_manifest(checkpoint)["num_steps"])
    except (CheckpointError, KeyError, ValueError, TypeError):
        return -1  # damaged: it may be replaced
