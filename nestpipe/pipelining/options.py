"""The options of a pipeline, checked when they are made."""

from dataclasses import dataclass

from nestpipe.embedding.capacity import check_resident_bytes
from nestpipe.embedding.cluster import BY_KEYS, Clustering
from nestpipe.embedding.exchange.codec import Codec, Codecs
from nestpipe.embedding.exchange.rounding import ROUNDING, codec_of
from nestpipe.embedding.plan import WINDOWS
from nestpipe.pipelining.schedule import OVERLAPPING, SCHEDULES


@dataclass(frozen=True)
class PipelineOptions:
    """Options of `pipeline` and Trainer, which take these fields as keywords."""

    schedule: str = "nested"
    """"serial", "inter", "intra" or "nested". The result is the same, bit for bit."""
    num_micro_batches: int = 1
    """Parts that a rank's batch is split into."""
    clustering: Clustering = BY_KEYS
    """Method that groups samples into micro-batches."""
    window: str = "once"
    """"once" if a row travels once a batch; "resend" if it travels with every micro-batch that uses it."""
    cross_batch: bool = True
    """In nested: rows that the batch before does not change are sent while it trains, and gradients that the next batch
    does not need are returned while that one trains. A step then ends only after the next batch was read, which
    must not depend on its result."""
    late_gradients: bool = True
    """Whether gradients may be returned during the next batch. Set it to False to read `Step.gradients`."""
    row_dtype: str | Codec | None = None
    """Form of rows in messages between ranks: "float32", "bfloat16", "float16" or "int8", which round, or a codec of
    your own. None stands for the dtype of the table, which does not."""
    gradient_dtype: str | Codec | None = None
    """Form of gradients in messages, likewise."""
    check_replicas: int = 0
    """Steps from one comparison of the replicas of rows to the next, with `World(replicas=...)`; 0 for none."""
    seed: int = 0
    """Seed of initial rows and of the model's random numbers."""
    num_threads: int = 1
    """Threads of the host store and of planning."""
    resident_bytes: int | str | None = None
    """Memory for resident rows on each rank, in inter and nested: "minimum" for what the batches in flight need, "auto"
    for half of the device memory that the first step leaves free, or a number of bytes (docs/row-pool.md). None stands
    for "auto" on an accelerator and "minimum" in host memory."""
    device_budget_bytes: int | None = None
    """Device memory that the embedding part of a rank may use; a batch that needs more is refused (docs/memory.md)."""
    stale: bool = False
    """For experiments: shows the model shared rows as they were before the last update. The result is wrong."""

    nvtx: bool = False
    """Whether operations are ranges of NVTX, for a profiler, on CUDA."""

    def __post_init__(self) -> None:
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("window", self.window, WINDOWS)
        if self.num_micro_batches < 1:
            raise ValueError(f"num_micro_batches is {self.num_micro_batches}, must be at least 1")
        if self.device_budget_bytes is not None and self.device_budget_bytes < 1:
            raise ValueError(f"device_budget_bytes is {self.device_budget_bytes}, must be at least 1")
        if self.check_replicas < 0:
            raise ValueError(f"check_replicas is {self.check_replicas}, must be at least 0")
        check_resident_bytes(self.resident_bytes)
        for name in ("row_dtype", "gradient_dtype"):
            self._check_codec(name, getattr(self, name))
        if self.stale and self.schedule not in OVERLAPPING:
            raise ValueError(f"stale rows need one of the schedules {', '.join(OVERLAPPING)}")

    @property
    def codecs(self) -> Codecs:
        return Codecs(codec_of(self.row_dtype), codec_of(self.gradient_dtype))

    def _check_codec(self, name: str, value: str | Codec | None) -> None:
        if value is None:
            return
        if isinstance(value, str):
            _check_choice(name, value, tuple(ROUNDING))
        elif not isinstance(value, Codec):
            raise ValueError(f"{name} is a {type(value).__name__}, must be a name or a Codec")
        if self.window == "resend":
            raise ValueError(
                f'{name} needs window="once": gradients of window "resend" would be rounded for each micro-batch, so '
                "that the window changed the result"
            )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(map(repr, choices))}")
