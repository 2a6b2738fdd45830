"""What may be chosen about a pipeline: checked once, when it is made, and handed through whole."""

from dataclasses import dataclass

from nestpipe.embedding.cluster import BY_KEYS, Clustering
from nestpipe.embedding.plan import WINDOWS
from nestpipe.pipelining.schedule import OVERLAPPING, SCHEDULES


@dataclass(frozen=True)
class PipelineOptions:
    schedule: str = "nested"
    """"serial", "inter", "intra" or "nested"; the result is the same, bit for bit"""
    num_micro_batches: int = 1
    """parts that a rank's batch is split into"""
    clustering: Clustering = BY_KEYS
    """which samples go together into a micro-batch"""
    window: str = "once"
    """"once": a row travels once a batch; "resend": with every micro-batch that uses it"""
    seed: int = 0
    """of initial rows and of the model's random numbers"""
    num_threads: int = 1
    """threads of the host store and of planning"""
    device_budget_bytes: int | None = None
    """device memory that the embedding part of a rank may take; a batch that needs more is refused (docs/memory.md)"""
    stale: bool = False
    """for experiments: shows the model shared rows as they were before the last update, which makes the result wrong"""

    def __post_init__(self) -> None:
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("window", self.window, WINDOWS)
        if self.num_micro_batches < 1:
            raise ValueError(f"num_micro_batches is {self.num_micro_batches}, must be at least 1")
        if self.device_budget_bytes is not None and self.device_budget_bytes < 1:
            raise ValueError(f"device_budget_bytes is {self.device_budget_bytes}, must be at least 1")
        if self.stale and self.schedule not in OVERLAPPING:
            raise ValueError(f"stale rows need one of the schedules {', '.join(OVERLAPPING)}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(map(repr, choices))}")
