"""The stages of a batch: one table that schedule, executor, trace and summary read."""

from dataclasses import dataclass

COMPUTE = "compute"
"""Lane of the caller's thread."""


@dataclass(frozen=True)
class Stage:
    name: str
    lane: str
    """Lane that does the stage when it overlaps training. Schedules without overlap do it on the compute lane."""
    time_field: str
    """Field of the summary that counts its time on the compute lane, waiting included."""
    description: str
    busy_field: str | None = None
    """Field of the summary that counts the time in which lanes work on it."""
    needs_ranks: bool = False
    """True if it waits for other ranks."""
    exchanges_rows: bool = False
    """True if it issues collectives of device memory, or comes between such."""
    takes_turns: bool = False
    """True if it runs much Python, for which it lets the launching thread go first."""


_STAGES = (
    Stage("prefetch", "input", "exposed_input_ms", "reads a batch, dedups it", "busy_input_ms", takes_turns=True),
    Stage("upload", "upload", "exposed_lookup_ms", "copies it to the device, dedups it there", takes_turns=True),
    Stage("route", "route", "exposed_lookup_ms", "tells owners which keys the batch needs", needs_ranks=True),
    Stage("retrieve", "host", "exposed_lookup_ms", "makes the owned rows resident, evicts others", "busy_host_ms"),
    Stage("begin", COMPUTE, "exposed_exchange_ms", "freezes the rows"),
    Stage(
        "send_early_rows", "rows", "exposed_exchange_ms", "those unchanged meanwhile", "busy_exchange_ms", True, True
    ),
    Stage("send_rows", "rows", "exposed_exchange_ms", "owners to requesters", "busy_exchange_ms", True, True),
    Stage("dense", COMPUTE, "dense_ms", "forward and backward of a micro-batch, and the dense optimizer"),
    Stage("return_gradients", "gradients", "exposed_exchange_ms", "back to owners", "busy_exchange_ms", True, True),
    Stage("share_sums", "gradients", "exposed_exchange_ms", "those of replicated rows", "busy_exchange_ms", True, True),
    Stage("reduce", COMPUTE, "exposed_reduce_ms", "sums dense gradients over ranks"),
    Stage("commit", COMPUTE, "exposed_reduce_ms", "all ranks agree whether the step counts"),
    Stage("sum_gradients", COMPUTE, "row_update_ms", "the owner adds up what all requesters returned"),
    Stage("update", COMPUTE, "row_update_ms", "the row optimizer"),
    Stage(
        "return_late_gradients",
        "gradients",
        "exposed_exchange_ms",
        "those that the next batch does not need",
        "busy_exchange_ms",
        needs_ranks=True,
        exchanges_rows=True,
    ),
    Stage(
        "late_update",
        "gradients",
        "exposed_exchange_ms",
        "adds them up, and updates their rows",
        "busy_update_ms",
        exchanges_rows=True,
    ),
    Stage("write_back", "host", "exposed_lookup_ms", "takes note of the outcome; writes rows", "busy_host_ms"),
    Stage("other", COMPUTE, "other_ms", "named work outside of the other stages"),
    Stage("", COMPUTE, "unattributed_ms", "time that no span covers"),
)

STAGES = {stage.name: stage for stage in _STAGES}

BUSY = {
    name: tuple(stage.name for stage in _STAGES if stage.busy_field == name)
    for name in dict.fromkeys(stage.busy_field for stage in _STAGES)
    if name is not None
}
"""Stages by field. A field counts the time in which at least one lane works on one of its stages."""
