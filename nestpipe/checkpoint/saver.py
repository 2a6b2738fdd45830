"""The saves of a run, one at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from nestpipe.checkpoint import folder
from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.lock import FolderLock
from nestpipe.checkpoint.save import Base, Save, SaveOptions
from nestpipe.checkpoint.subject import Subject
from nestpipe.store import Store


@dataclass(frozen=True)
class _Snapshot:
    """The snapshot of a store behind a save. Another one takes the marks of what has changed."""

    store: Store
    number: int

    @property
    def is_last(self) -> bool:
        return self.store.num_snapshots == self.number


class Saver:
    """Begins and finishes saves, and keeps what the next one may be based on."""

    def __init__(self) -> None:
        self._save: Save | None = None
        self._keep = 1
        self._snapshot: _Snapshot | None = None
        self._base: Base | None = None
        """Checkpoint of `_snapshot`, once it is complete."""
        self._locks: dict[Path, FolderLock] = {}
        self._removal: Thread | None = None
        self._num_when_written = 0
        self.num_waits = 0
        """Times that training has waited for rows that were kept aside to be written."""
        self.on_error: Callable[[CheckpointError], None] | None = None
        """Called, on all ranks, when a save fails; None raises the error instead."""

    @property
    def is_saving(self) -> bool:
        return self._save is not None

    def is_written(self, num_saves_written: int) -> bool:
        """Returns whether all ranks have written the save under way. num_saves_written: from the header of a batch."""
        return self._save is not None and num_saves_written >= self._num_when_written

    def hold(self, path: Path) -> None:
        """Locks a folder of checkpoints until `close`. Only rank 0 does so."""
        self._locks[path.resolve()] = FolderLock(path.resolve())

    def begin(self, subject: Subject, path: Path, extra: Mapping[str, Any], options: SaveOptions) -> None:
        """Begins a save, after the one before is finished. All ranks call it at a step boundary; rows are flushed."""
        self.finish(waits_for_removal=True)
        path, store = path.resolve(), subject.store
        base, self._base = self._usable_base(store, path, options.complete_every), None
        self._num_when_written = subject.world.notice.num_saves_written + 1  # none is under way: equal on all ranks
        try:
            self._save = Save(subject, path, extra, options, base, is_locked=path in self._locks)
        except CheckpointError as error:
            self._fail(error)
            return
        self._snapshot, self._keep = _Snapshot(store, store.num_snapshots), options.keep

    def finish(self, waits_for_removal: bool = False) -> None:
        """Finishes the save under way, if there is one. All ranks call it. A thread then removes older checkpoints."""
        save, self._save = self._save, None
        try:
            if save is not None:
                self._base = save.finish()
                self.num_waits += save.num_waits
                if save.is_on_rank_0:
                    self._remove_older(self._base.path)
        except CheckpointError as error:
            self._fail(error)
        if waits_for_removal and self._removal is not None:
            self._removal.join()

    def close(self) -> None:
        """Waits for the removal of older checkpoints, and releases all locks."""
        if self._removal is not None:
            self._removal.join()
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    def _remove_older(self, newest: Path) -> None:
        self._removal = Thread(target=folder.remove_older, args=(newest, self._keep), name="remove", daemon=True)
        self._removal.start()

    def _fail(self, error: CheckpointError) -> None:
        if self.on_error is None:
            raise error
        self.on_error(error)

    def _usable_base(self, store: Store, path: Path, complete_every: int) -> Base | None:
        base, snapshot = self._base, self._snapshot
        if base is None or snapshot is None or snapshot.store is not store or not snapshot.is_last:
            return None
        return base if base.path.parent == path and base.num_since_complete + 1 < complete_every else None
