"""The keys of a cluster file: one small dataclass for each section. The defaults are the default cluster."""

from dataclasses import dataclass, field

from nestpipe.embedding.exchange.rounding import ROUNDING
from nestpipe.recipe.key import key
from nestpipe.simulator.overlap import Overlap

WINDOWS = ("once", "resend")


@dataclass(frozen=True)
class RunSection:
    workers: tuple[int, ...] = key(
        (128, 256, 512, 1024, 1536), "numbers of workers to simulate; --workers sets it", at_least=1
    )
    steps: int = key(50, "simulated steps; the first 5, or tenth, are left out of all figures", at_least=7)
    seed: int = key(1, "seed of the jitter", at_least=0)


@dataclass(frozen=True)
class BatchSection:
    """A batch of one worker."""

    samples: int = key(512, "samples", at_least=1)
    keys: int = key(200_000, "distinct keys", at_least=1)
    replicated_keys: int = key(
        0, "distinct keys of replicated tables in the global batch, in addition; each worker uses all", at_least=0
    )
    bags: int = key(0, "bags of features that are pooled at the owner: one for each sample and feature", at_least=0)
    keys_per_bag: int = key(20, "keys of a bag", at_least=1)
    bag_keys: int = key(0, "distinct keys of bags, in addition", at_least=0)
    owned_share: float = key(
        0.5, "distinct keys that a worker owns of the global batch, relative to `keys`: workers share keys", above=0
    )
    node_share: float = key(
        0.8,
        "two hops: distinct keys of a node, relative to those of its workers, added up; an assumption",
        above=0,
        at_most=1,
    )
    dim: int = key(512, "columns of a row", at_least=1)
    state_columns: int = key(1, "columns of optimizer state of a row; they never leave the owner", at_least=0)
    bytes_per_number: int = key(4, "bytes of a number of a row", at_least=1)
    row_dtype: str | None = key(None, "form of rows in messages; not set: as in the table", choices=tuple(ROUNDING))
    gradient_dtype: str | None = key(
        None, "form of gradients in messages; not set: as in the table", choices=tuple(ROUNDING)
    )
    input_mb: float = key(8.0, "megabytes that upload copies to the device", at_least=0)
    num_micro_batches: int = key(8, "micro-batches of intra and nested; serial and inter are not split", at_least=1)
    window: str = key("once", "a row travels once a batch, or with each micro-batch that uses it", choices=WINDOWS)
    resend_growth: float = key(
        1.25, "exchanged bytes with window = resend, relative to once, at num_micro_batches", at_least=1
    )
    head_share: float | None = key(
        None, "share of rows that the first micro-batch waits for; not set: equal parts", at_least=0, at_most=1
    )
    tail_share: float | None = key(
        None, "share of gradients that the last micro-batch returns; not set: equal parts", at_least=0, at_most=1
    )
    key_overlap: float = key(
        0.3, "share of a batch's keys that the global batch before, or after, has, too", at_least=0, at_most=1
    )
    head_overlap: float | None = key(
        None, "the same among rows of the first micro-batch; not set: key_overlap", at_least=0, at_most=1
    )
    tail_overlap: float | None = key(
        None, "the same among gradients of the last micro-batch; not set: key_overlap", at_least=0, at_most=1
    )


@dataclass(frozen=True)
class HostSection:
    read_ms: float = key(0.0, "reading a batch", at_least=0)
    gather_gb_per_second: float = key(20.0, "reading records from the host store; `bench h200 --part stages`", above=0)
    scatter_gb_per_second: float = key(20.0, "writing records to the host store", above=0)
    pcie_gb_per_second: float = key(50.0, "copying records between host and device, each way", above=0)
    written_share: float = key(1.0, "records that are written back, relative to those read", at_least=0)
    planning_keys: int = key(40_000, "keys for which [by_workers] has dedup_ms and route_ms", at_least=1)


@dataclass(frozen=True)
class ByWorkersSection:
    """Costs that depend on the number of workers. Between the given numbers they are interpolated."""

    workers: tuple[int, ...] = key((2, 16, 128, 1024, 1536), "numbers of workers, ascending", at_least=1)
    dedup_ms: tuple[float, ...] = key(
        (1.88, 1.82, 1.89, 2.12, 2.12), "the requester's dedup of planning_keys; `bench scale`, 26 tables", at_least=0
    )
    route_ms: tuple[float, ...] = key(
        (2.06, 2.08, 2.25, 3.17, 3.48), "host work of route and plan of planning_keys; `bench scale`", at_least=0
    )
    reduce_ms: tuple[float, ...] = key(
        (0.0, 0.0, 0.0, 0.0, 0.0), "added to the sum of dense gradients over workers", at_least=0
    )
    imbalance: tuple[float, ...] = key(
        (1.0, 1.02, 1.05, 1.15, 1.2), "records of the busiest owner, relative to the mean; an assumption", at_least=1
    )


@dataclass(frozen=True)
class NetworkSection:
    devices_per_node: int = key(8, "workers of a node", at_least=1)
    inside_gb_per_second: float = key(200.0, "bandwidth of a worker inside its node, each way", above=0)
    between_gb_per_second: float = key(25.0, "bandwidth of a worker between nodes, each way", above=0)
    inside_latency_us: float = key(2.0, "latency of an All2All for each peer in the node", at_least=0)
    between_latency_us: float = key(5.0, "latency of an All2All for each peer in another node", at_least=0)
    incast: float = key(0.0005, "growth of an All2All's time between nodes for each peer there", at_least=0)
    has_issuer: bool = key(
        True,
        "one thread of a worker issues all exchanges of rows, as with NCCL; false: each lane its own, as with gloo",
    )


@dataclass(frozen=True)
class DenseSection:
    ms: float = key(100.0, "forward and backward of a batch that is not split", at_least=0)
    split_ms: float = key(1.0, "added by each micro-batch after the first", at_least=0)
    optimizer_ms: float = key(1.0, "dense optimizer", at_least=0)
    parameters_mb: float = key(40.0, "megabytes of dense gradients that are summed over workers", at_least=0)
    hidden_reduce_share: float = key(
        0.0, "share of that sum that the last backward hides, in intra and nested", at_least=0, at_most=1
    )
    row_update_ms: float = key(1.0, "the owner's sum of gradients, and the row optimizer", at_least=0)
    sync_ms: float = key(
        0.0, "copying shared rows between the buffers of two batches; nestpipe has none: rows stay resident", at_least=0
    )


@dataclass(frozen=True)
class PoolSection:
    hit_rate: float = key(
        0.3, "share of owned keys that are resident, in schedules that overlap batches", at_least=0, at_most=1
    )


@dataclass(frozen=True)
class TwoDSection:
    """2D sparse parallel: with sums of gradients (exchange.replicas), or as it was published, which averages copies."""

    num_groups: int = key(4, "groups of workers; each has a copy of all rows", at_least=1)
    sync_ms: float = key(0.0, "averaging the copies, for each step, in the ways that do", at_least=0)


@dataclass(frozen=True)
class JitterSection:
    sigma: float = key(0.02, "spread of the time of a worker's own work, log-normal around the given time", at_least=0)
    straggler_probability: float = key(0.0, "probability that a worker is slow for one step", at_least=0, at_most=1)
    straggler_factor: float = key(1.5, "time of a slow worker's own work, relative to the usual", at_least=1)


@dataclass(frozen=True)
class Cluster:
    run: RunSection = field(default_factory=RunSection)
    batch: BatchSection = field(default_factory=BatchSection)
    host: HostSection = field(default_factory=HostSection)
    by_workers: ByWorkersSection = field(default_factory=ByWorkersSection)
    network: NetworkSection = field(default_factory=NetworkSection)
    dense: DenseSection = field(default_factory=DenseSection)
    pool: PoolSection = field(default_factory=PoolSection)
    two_d: TwoDSection = field(default_factory=TwoDSection)
    jitter: JitterSection = field(default_factory=JitterSection)

    @property
    def overlap(self) -> Overlap:
        return Overlap(self.batch.key_overlap, self.batch.head_overlap, self.batch.tail_overlap)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a message."""
        return self._message_bytes(self.batch.row_dtype)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a row's gradient in a message."""
        return self._message_bytes(self.batch.gradient_dtype)

    def _message_bytes(self, name: str | None) -> int:
        return self.batch.dim * self.batch.bytes_per_number if name is None else ROUNDING[name].bytes_of(self.batch.dim)

    @property
    def sum_bytes(self) -> int:
        """Bytes of a row's sum of gradients, in a message from its owner."""
        return self.batch.dim * self.batch.bytes_per_number

    @property
    def record_bytes(self) -> int:
        """Bytes of a row and its state."""
        return (self.batch.dim + self.batch.state_columns) * self.batch.bytes_per_number
