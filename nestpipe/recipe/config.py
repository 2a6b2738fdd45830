"""The keys of a recipe: one small dataclass for each section, and Config, which has all sections."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nestpipe.data.files.user_histories import CROPS
from nestpipe.data.negatives import NEGATIVES_PER
from nestpipe.device.streams import default_device
from nestpipe.distributed.backend import BACKENDS
from nestpipe.embedding.capacity import CHOICES as RESIDENT_CHOICES
from nestpipe.embedding.cluster import CLUSTER_COSTS, CLUSTER_METHODS
from nestpipe.embedding.table import PLACEMENTS, POOLING_PLACES
from nestpipe.models.dlrm import INTERACTIONS
from nestpipe.pipelining.schedule import SCHEDULES
from nestpipe.recipe.exchange import ExchangeSection
from nestpipe.recipe.key import Key, args_key, key
from nestpipe.registry import datasets, metrics, models, optimizers
from nestpipe.store.interface import MOST_ROWS

INITS = ("normal", "truncated_normal", "uniform", "constant")
DENSE_OPTIMIZERS = ("sgd", "adagrad", "adam", "adamw")
PRECISIONS = ("float32", "bfloat16")
ON_ERROR = ("stop", "continue")
MOST_THREADS = 1024
AUTO = "auto"

RETIRED = {"pipeline.fault": "none"}
"""Keys of earlier versions with their defaults; a recipe may still have such a key if it has its default."""


@dataclass(frozen=True)
class DataSection:
    kind: str = key("clicks", "the data; `nestpipe list datasets` lists what there is", registry=datasets)
    seed: int = key(0, "seed of synthetic data, or of the order of the rows of files", at_least=0)
    skew: float = key(1.05, "clicks: exponent of the Zipf distribution of the keys", at_least=0)
    num_samples: int | None = key(None, "number of samples; not set: endless", at_least=1)
    path: str | None = key(None, "published data: the folder that `nestpipe data prepare` wrote")
    paths: tuple[str, ...] = key((), "parquet: files, folders or patterns to train on; [schema] names their columns")
    held_out: tuple[str, ...] = key((), "parquet: files, folders or patterns to evaluate on; empty: no evaluation")
    window: int = key(
        8, "files: row groups that are shuffled together; more shuffle better and need more memory", at_least=1
    )
    num_epochs: int | None = key(None, "files: passes over the data; not set: endless", at_least=1)
    num_threads: int = key(1, "files: threads that read ahead", at_least=1, at_most=MOST_THREADS)
    num_workers: int | None = key(
        None,
        "processes that read batches ahead; files: each reads all rows; not set: 2 for synthetic data on an "
        "accelerator, else 0",
        at_least=0,
        at_most=MOST_THREADS,
    )
    skip_bad: bool = key(False, "files: leave out what cannot be read; reads all files once before the training")
    crop: str = key(
        "last", "published histories: the items to train on, if there are more than max_length", choices=CROPS
    )
    args: Mapping[str, Any] = args_key("settings of the data, as its class reads them")


@dataclass(frozen=True)
class SchemaSection:
    """The columns of data.kind = "parquet"."""

    keys: tuple[str, ...] = key((), "columns of keys: integers or lists of integers; each has a table of its name")
    dense: tuple[str, ...] = key((), "columns of dense inputs: numbers")
    label: str = key("label", "column of labels: 0 or 1")
    weight: str | None = key(None, "column of sample weights; not set: 1 for each")


@dataclass(frozen=True)
class HistoriesSection:
    """The data of data.kind = "histories". The longest history has model.max_length items."""

    num_items: int = key(2000, "number of items", at_least=1)
    skew: float = key(0.8, "exponent of the Zipf distribution of the items", at_least=0)
    num_interests: int = key(20, "number of interests", at_least=1)
    interests_a_user: int = key(3, "interests of a user", at_least=1)
    num_groups: int = key(25, "number of item groups; each item leads to one group", at_least=1)
    follow: float = key(0.6, "probability that an item is one that the item before leads to", at_least=0, below=1)
    interest: float = key(0.25, "probability that an item is one of the user's interests", at_least=0, below=1)
    new_session: float = key(0.15, "probability that an item begins a session", at_least=0, at_most=1)
    median_length: float = key(20.0, "median of the lengths of histories", at_least=1)
    length_spread: float = key(0.5, "standard deviation of the logarithms of lengths", at_least=0)


@dataclass(frozen=True)
class ModelSection:
    kind: str = key("dlrm", "the model; `nestpipe list models` lists what there is", registry=models)
    dim: int = key(64, "columns of a row, unless its table sets dim", at_least=1, at_most=2**20)
    bottom: tuple[int, ...] = key((128,), "dlrm: widths of the hidden layers before the interaction", at_least=1)
    top: tuple[int, ...] = key((256, 128), "dlrm: widths of the hidden layers after the interaction", at_least=1)
    interaction: str = key(
        "dot", "dlrm: interaction of the embeddings: dot products, or a cross network", choices=INTERACTIONS
    )
    cross_layers: int = key(3, "dlrm: layers of the cross network", at_least=1)
    cross_rank: int = key(512, "dlrm: rank of the cross network's matrices", at_least=1)
    max_length: int = key(200, "hstu, fuxi: largest number of items of a history", at_least=1, below=2**12)
    num_layers: int = key(2, "hstu, fuxi: layers of attention", at_least=1)
    num_heads: int = key(1, "hstu, fuxi: heads of a layer", at_least=1)
    dim_qk: int = key(50, "hstu, fuxi: width of a head's queries and keys", at_least=1)
    dim_v: int = key(50, "hstu, fuxi: width of a head's values", at_least=1)
    dropout: float = key(0.2, "hstu, fuxi: share of elements that dropout sets to zero", at_least=0, below=1)
    ffn_multiply: int = key(1, "fuxi: width of the hidden layer, in multiples of dim", at_least=1)
    num_negatives: int = key(128, "hstu, fuxi: negatives of a next item", at_least=1)
    negatives_per: str = key(
        "position", "hstu, fuxi: draw negatives for each position, or once for a sample", choices=NEGATIVES_PER
    )
    temperature: float = key(0.05, "hstu, fuxi: divisor of the scores", above=0)
    args: Mapping[str, Any] = args_key("arguments of the model's class")


@dataclass(frozen=True)
class TableSection:
    """One of [[tables]]: settings of one table of the data."""

    name: str = field(metadata={"key": Key("name of a table of the data")})
    dim: int | None = key(None, "columns of a row; not set: model.dim", at_least=1, at_most=2**20)
    init: str = key("normal", "distribution of initial rows", choices=INITS)
    init_scale: float = key(0.02, "standard deviation; uniform: largest magnitude; constant: the value", at_least=0)
    optimizer: str | None = key(None, "row optimizer; not set: row_optimizer.kind", registry=optimizers)
    lr: float | None = key(None, "learning rate; not set: row_optimizer.lr", above=0)
    num_keys: int | None = key(None, "keys are 0 .. num_keys - 1; not set: any integer", at_least=1)
    max_rows: int | None = key(
        None, "largest number of rows on one rank; not set: 2^32 - 2", at_least=1, at_most=MOST_ROWS
    )
    frozen: bool = key(False, "do not update the rows")
    placement: str = key(
        "sharded",
        "each row on one rank, or all rows on every rank; auto: chosen from the first batch",
        choices=(*PLACEMENTS, AUTO),
    )
    where: str = key(
        "requester",
        "rank that adds up the rows of a pooled feature: that of the sample, or their owners, which send sums; auto: "
        "chosen from the first batch",
        choices=(*POOLING_PLACES, AUTO),
    )


@dataclass(frozen=True)
class RowOptimizerSection:
    kind: str | None = key(
        None, "optimizer of the rows; not set: adagrad, or adam for models of histories", registry=optimizers
    )
    lr: float | None = key(None, "learning rate; not set: 0.05, or dense_optimizer.lr for models of histories", above=0)
    weight_decay: float = key(0.0, "weight decay, of the rows of the batch only", at_least=0)
    initial_accumulator: float = key(0.0, "adagrad, rowwise_adagrad: initial sum of squares", at_least=0)
    betas: tuple[float, float] | None = key(
        None,
        "adam: betas; not set: 0.9, 0.999, or dense_optimizer.betas for models of histories",
        at_least=0,
        below=1,
    )
    eps: float | None = key(None, "added to the denominator; not set: the optimizer's default", at_least=0)
    args: Mapping[str, Any] = args_key("arguments of the row optimizer's class")


@dataclass(frozen=True)
class DenseOptimizerSection:
    kind: str = key("adam", "optimizer of the dense parameters", choices=DENSE_OPTIMIZERS)
    lr: float = key(1e-3, "learning rate", above=0)
    weight_decay: float = key(0.0, "weight decay", at_least=0)
    betas: tuple[float, float] = key((0.9, 0.999), "adam, adamw: betas", at_least=0, below=1)
    clip_norm: float | None = key(None, "largest norm of all dense gradients; not set: no clipping", above=0)
    clip_rows: bool = key(False, "include the gradients of rows in clip_norm")
    warmup_steps: int = key(0, "steps in which the dense learning rate rises linearly to lr", at_least=0)


@dataclass(frozen=True)
class TrainSection:
    steps: int = key(300, "steps to train", at_least=0)
    seed: int = key(0, "seed of the initial rows and dense parameters", at_least=0, option="seed")
    batch_size: int = key(2048, "samples in a batch of one rank", at_least=1)
    deterministic: bool = key(True, "use deterministic dense kernels; false permits faster ones")
    precision: str = key("float32", "precision of the dense model, by autocast; rows keep theirs", choices=PRECISIONS)
    compiled: bool = key(False, "compile the dense model by torch.compile(dynamic=True)")


@dataclass(frozen=True)
class PipelineSection:
    schedule: str = key(
        "nested", "schedule of the stages; all have the same bits", choices=SCHEDULES, option="schedule"
    )
    num_micro_batches: int | str = key(
        1,
        "micro-batches of a batch; auto: chosen before the first step, by trial steps that change nothing",
        choices=(AUTO,),
        at_least=1,
        option="num_micro_batches",
    )
    check_split: bool = key(True, "refuse a model whose loss depends on how a batch is split")
    stale: bool = key(False, "for experiments: train on stale rows, as before the last update", option="stale")


@dataclass(frozen=True)
class ClusterSection:
    method: str = key(
        "spectral", "how to find samples that share keys, to put them into one micro-batch", choices=CLUSTER_METHODS
    )
    cost: str = key(
        "keys", "cost of a sample by which micro-batches are balanced: its keys, or their square", choices=CLUSTER_COSTS
    )


@dataclass(frozen=True)
class StoreSection:
    num_threads: int | None = key(
        None,
        "threads of the host store; not set: cores // ranks on this host",
        at_least=1,
        at_most=MOST_THREADS,
        option="num_threads",
    )


@dataclass(frozen=True)
class RuntimeSection:
    dense_threads: int | None = key(
        None,
        "threads of the dense part; not set: cores // ranks on this host, or 1 if it is on an accelerator",
        at_least=1,
        at_most=MOST_THREADS,
    )
    device: str | None = key(
        None, "device of the model, as torch names it; not set: the accelerator, or cpu if there is none"
    )


@dataclass(frozen=True)
class DistributedSection:
    timeout_seconds: float = key(25.0, "give a rank up after this time without a sign of life", above=0)
    stall_seconds: float = key(600.0, "give a rank up after this time without progress, if others wait for it", above=0)
    backend: str = key(
        "auto", "backend for device memory; auto: nccl if each rank has its own device, else gloo", choices=BACKENDS
    )
    shared_memory: bool = key(
        True, "ranks that are all on one host exchange host memory through memory that they share, instead of gloo"
    )


@dataclass(frozen=True)
class MemorySection:
    resident_bytes: int | str | None = key(
        None,
        "memory for resident rows of a rank: minimum, auto or a number of bytes; not set: auto on an accelerator, else "
        "minimum",
        choices=RESIDENT_CHOICES,
        at_least=1,
        option="resident_bytes",
    )
    device_budget_bytes: int | None = key(
        None,
        "device memory for a rank's embeddings; a batch that needs more is refused; not set: no limit",
        at_least=1,
        option="device_budget_bytes",
    )


@dataclass(frozen=True)
class EvaluateSection:
    num_samples: int = key(65536, "number of held-out samples; 0: no evaluation", at_least=0)
    batch_size: int | None = key(None, "samples in a batch of one rank; not set: train.batch_size", at_least=1)
    split: str | None = key(
        None,
        "split of published data; not set: validation; for histories test, if no evaluation chooses the model",
        choices=("validation", "test"),
    )
    every: int = key(0, "steps between evaluations while training; 0: only at the end", at_least=0)
    metrics: tuple[str, ...] | None = key(
        None,
        "metrics in addition to the loss; not set: those of the data that the model has a method for",
        registry=metrics,
    )
    metric: str = key("loss", "number of an evaluation that patience and checkpoint.best compare")
    patience: int = key(0, "stop after this number of evaluations without improvement; 0: never", at_least=0)


@dataclass(frozen=True)
class PublishedSection:
    """Published results for the settings of this recipe; shown next to the run's own."""

    hr_at_10: float | None = key(None, "published hit rate", at_least=0, at_most=1)
    ndcg_at_10: float | None = key(None, "published NDCG", at_least=0, at_most=1)
    auc: float | None = key(None, "published AUC", at_least=0, at_most=1)
    log_loss: float | None = key(None, "published log loss", at_least=0)


@dataclass(frozen=True)
class LoggingSection:
    every: int = key(10, "steps between progress lines, if the output is not a terminal", at_least=1)
    dir: str | None = key(None, "folder for the summary, a line for each step, and the trace; not set: none")
    jsonl: bool = key(True, "write a line of JSON for each step and each evaluation to logging.dir")
    tensorboard: bool = key(False, "write events for TensorBoard to logging.dir")
    nvtx: bool = key(False, "on CUDA, name operations in a profiler by ranges of NVTX", option="nvtx")


@dataclass(frozen=True)
class CheckpointSection:
    dir: str | None = key(None, "folder of checkpoints, from which a run resumes; not set: no checkpoints")
    every: int = key(0, "steps between checkpoints; 0: only at the end", at_least=0)
    keep: int = key(2, "checkpoints that stay in checkpoint.dir, the newest included", at_least=1)
    complete_every: int = key(
        10, "one in this number of checkpoints has all rows, the others those that have changed", at_least=1
    )
    on_error: str = key("stop", "stop, or continue without it, when a checkpoint cannot be written", choices=ON_ERROR)
    best: str | None = key(None, "folder for the model of the best evaluation; not set: none is kept")
    load: str | None = key(None, "checkpoint to start from, if checkpoint.dir has none; not set: a new model")
    strict: bool = key(True, "refuse a checkpoint.load that does not fit in all parts; false: take what fits")


@dataclass(frozen=True)
class Config:
    """A whole run. The defaults are the demo."""

    data: DataSection = DataSection()
    schema: SchemaSection = SchemaSection()
    histories: HistoriesSection = HistoriesSection()
    model: ModelSection = ModelSection()
    tables: tuple[TableSection, ...] = ()
    row_optimizer: RowOptimizerSection = RowOptimizerSection()
    dense_optimizer: DenseOptimizerSection = DenseOptimizerSection()
    train: TrainSection = TrainSection()
    pipeline: PipelineSection = PipelineSection()
    exchange: ExchangeSection = field(default_factory=ExchangeSection)
    cluster: ClusterSection = ClusterSection()
    store: StoreSection = StoreSection()
    runtime: RuntimeSection = RuntimeSection()
    distributed: DistributedSection = DistributedSection()
    memory: MemorySection = MemorySection()
    evaluate: EvaluateSection = EvaluateSection()
    published: PublishedSection = PublishedSection()
    logging: LoggingSection = LoggingSection()
    checkpoint: CheckpointSection = CheckpointSection()

    @property
    def chooses(self) -> bool:
        """Returns whether evaluations during training choose the model that the run ends with, or keeps."""
        return self.evaluate.patience > 0 or self.checkpoint.best is not None

    def pipeline_options(self) -> dict[str, Any]:
        """Returns the fields of PipelineOptions that keys set; a key names its field where it is declared."""
        sections = [getattr(self, section.name) for section in fields(self) if section.name != "tables"]
        declared = [(section, field) for section in sections for field in fields(section)]
        options = {field.metadata["key"].option: getattr(section, field.name) for section, field in declared}
        return {name: value for name, value in options.items() if name is not None}

    def resolved(self, ranks_on_host: int, cores: int) -> "Config":
        """Returns the config with threads, device and row optimizer filled in, because bits depend on them."""
        num_threads = min(max(1, cores // ranks_on_host), MOST_THREADS)
        store, runtime = self.store, self.runtime
        if store.num_threads is None:
            store = replace(store, num_threads=num_threads)
        if runtime.device is None:
            runtime = replace(runtime, device=default_device())
        if runtime.dense_threads is None:
            # With an accelerator the host has only small operations, which take longer if they wait for other threads.
            runtime = replace(runtime, dense_threads=num_threads if runtime.device == "cpu" else 1)
        return replace(self, store=store, runtime=runtime, row_optimizer=self._row_optimizer())

    def _row_optimizer(self) -> RowOptimizerSection:
        rows, dense = self.row_optimizer, self.dense_optimizer
        kind, lr, betas = "adagrad", 0.05, (0.9, 0.999)
        if getattr(models.find(self.model.kind).value, "learns_from", None) == "histories":
            kind, lr, betas = "adam", dense.lr, dense.betas
        return replace(rows, kind=rows.kind or kind, lr=rows.lr or lr, betas=rows.betas or betas)
