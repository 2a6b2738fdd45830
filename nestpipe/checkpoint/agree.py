"""Work that all ranks do together: it succeeds on all of them, or raises on all of them."""

from collections.abc import Callable

from nestpipe.checkpoint.errors import CheckpointError, DamagedError
from nestpipe.distributed.world import World

_DONE, _FAILED, _DAMAGED = "+", "-", "!"


def agree(world: World, work: Callable[[], str], what: str, only_rank: int | None = None) -> list[str]:
    """Runs `work` on every rank, or on one, and returns each rank's result. If it fails anywhere, all ranks raise:
    DamagedError if any rank found damage, else CheckpointError."""
    text = ""
    if only_rank in (None, world.rank):
        try:
            with world.busy():
                text = _DONE + work()
        except Exception as error:  # every rank learns of it, and raises
            kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            text = f"{_DAMAGED if isinstance(error, DamagedError) else _FAILED}{kind}{error}"
    texts = world.control.share_text(text)
    failures = [f"rank {rank}: {t[1:]}" for rank, t in enumerate(texts) if t.startswith((_FAILED, _DAMAGED))]
    if failures:
        is_damage = any(t.startswith(_DAMAGED) for t in texts)
        kind_of_error = DamagedError if is_damage else CheckpointError
        raise world.watch.agreed(kind_of_error(f"{what} failed: {'; '.join(failures)}"))
    return [t[1:] for t in texts]
