"""The checkpoints of a run: at intervals while it trains, and one at its end."""

import sys
from pathlib import Path

from nestpipe.checkpoint import CheckpointError
from nestpipe.evaluation.validation import Validation
from nestpipe.recipe.config import CheckpointSection
from nestpipe.train.fit_result import FitResult
from nestpipe.train.trainer import Trainer


class Checkpoints:
    """A callback of Trainer.fit. Files are written while training goes on."""

    def __init__(self, section: CheckpointSection, trainer: Trainer, validation: Validation | None) -> None:
        self.every = section.every
        self._section = section
        self._trainer = trainer
        self._validation = validation
        self._num_saved = trainer.num_steps
        """Steps of the newest checkpoint."""
        if section.on_error == "continue":
            trainer.saver.on_error = self._warn

    @property
    def is_periodic(self) -> bool:
        return self._section.dir is not None and self.every > 0

    def __call__(self, trainer: Trainer, result: FitResult) -> bool:
        self._save(wait=False)
        return False

    def save_last(self) -> None:
        """Waits until the last checkpoint is complete. Saves again if it has failed, or if steps were trained since."""
        self._trainer.finish_save()
        if self._section.dir is not None and self._trainer.num_steps > self._num_saved:
            self._save(wait=True)

    def _save(self, wait: bool) -> None:
        section, validation = self._section, self._validation
        assert section.dir is not None
        self._trainer.saver.finish()  # its failure is not that of the next one
        self._num_saved = self._trainer.num_steps
        self._trainer.save(
            Path(section.dir),
            extra={} if validation is None else {"validation": validation.state()},
            wait=wait,
            keep=section.keep,
            complete_every=section.complete_every,
        )

    def _warn(self, error: CheckpointError) -> None:
        """The run goes on without this checkpoint. The next one has all rows, and there is one at the end."""
        self._num_saved = -1
        if self._trainer.world.rank == 0:
            print(f"nestpipe: {error}; training goes on without this checkpoint", file=sys.stderr, flush=True)
