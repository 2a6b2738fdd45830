"""Notices: small facts that ranks tell each other without a collective of their own."""

from dataclasses import dataclass


@dataclass
class Notice:
    """What a rank tells all others with each of its batches.

    The header of a batch's route carries it, so all ranks know the same at the same batch. A notice is read once for
    each batch, when the header is encoded. Any thread, or a signal handler, may set a field at any time.
    """

    is_stop_requested: bool = False
    """True once this rank asks all ranks to stop training."""
    num_saves_written: int = 0
    """Saves of this rank that are on disk."""
