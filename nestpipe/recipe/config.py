"""What a recipe may say: one small dataclass for each section, and all of them together."""

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from nestpipe.data.files.user_histories import CROPS
from nestpipe.data.negatives import NEGATIVES_PER
from nestpipe.device.streams import default_device
from nestpipe.distributed.backend import BACKENDS
from nestpipe.embedding.cluster import CLUSTER_COSTS, CLUSTER_METHODS
from nestpipe.embedding.plan import WINDOWS
from nestpipe.models.dlrm import INTERACTIONS
from nestpipe.pipelining.schedule import SCHEDULES
from nestpipe.store.interface import MOST_ROWS

PREPARED_HISTORIES = ("movielens-1m", "movielens-20m", "kuairand-27k", "kuairand-1k", "kuairand-pure")
PREPARED_CLICKS = ("criteo-kaggle", "criteo-terabyte")
PREPARED = (*PREPARED_HISTORIES, *PREPARED_CLICKS)
"""data that `nestpipe data prepare` makes: data.path is its folder"""
DATA = ("clicks", "histories", "parquet", *PREPARED)
SEQUENCE_MODELS = ("hstu", "fuxi")
MODELS = ("dlrm", *SEQUENCE_MODELS)
INITS = ("normal", "truncated_normal", "uniform", "constant")
ROW_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
DENSE_OPTIMIZERS = ("sgd", "adagrad", "adam", "adamw")
PRECISIONS = ("float32", "bfloat16")
MOST_THREADS = 1024

RETIRED = {"pipeline.fault": "none"}
"""keys that recipes of earlier versions have: at this value, their default, they are dropped"""

T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    """What a key of a recipe means, and which values it takes; limits of a list are those of its elements."""

    meaning: str
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None


def key(default: T, meaning: str, **allowed: Any) -> T:
    """A field of a section; reading, checking and describing a recipe are all driven by what it says here."""
    return field(default=default, metadata={"key": Key(meaning, **allowed)})


@dataclass(frozen=True)
class DataSection:
    kind: str = key(
        "clicks", "which data; clicks and histories are synthetic, parquet is files of your own", choices=DATA
    )
    seed: int = key(0, "of the synthetic data, or of the order of the rows of files", at_least=0)
    skew: float = key(1.05, "of clicks: exponent of the Zipf distribution of the keys", at_least=0)
    num_samples: int | None = key(None, "samples in all; not set: endless", at_least=1)
    path: str | None = key(None, "folder that `nestpipe data prepare` made; needed where data.kind is prepared data")
    paths: tuple[str, ...] = key(
        (), "of parquet: files, folders or patterns to train on; [schema] says what is in them"
    )
    held_out: tuple[str, ...] = key((), "of parquet: files, folders or patterns to evaluate on; none: no evaluation")
    window: int = key(8, "of files: row groups whose rows are mixed; more mix better and need more memory", at_least=1)
    num_epochs: int | None = key(None, "of files: how often each row comes; not set: endless", at_least=1)
    num_threads: int = key(1, "of files: threads that read ahead", at_least=1, at_most=MOST_THREADS)
    skip_bad: bool = key(False, "of files: leave out what cannot be read; reads everything once before the training")
    crop: str = key(
        "last", "of prepared histories: which items of one longer than max_length are trained on", choices=CROPS
    )


@dataclass(frozen=True)
class SchemaSection:
    """Which columns of data.kind = "parquet" are what."""

    keys: tuple[str, ...] = key((), "columns of integers or lists of integers; each has a table of its name")
    dense: tuple[str, ...] = key((), "columns of numbers: the dense input")
    label: str = key("label", "column with 0 or 1")
    weight: str | None = key(None, "column with the weights of samples; not set: 1 each")


@dataclass(frozen=True)
class HistoriesSection:
    """What data.kind = "histories" is made of; the longest history has model.max_length items."""

    num_items: int = key(2000, "items of the corpus", at_least=1)
    skew: float = key(0.8, "exponent of the Zipf distribution of the items", at_least=0)
    num_interests: int = key(20, "interests there are", at_least=1)
    interests_a_user: int = key(3, "interests that a user has", at_least=1)
    num_groups: int = key(25, "groups of items; each item leads to one", at_least=1)
    follow: float = key(0.6, "probability of an item that the one before leads to", at_least=0, below=1)
    interest: float = key(0.25, "probability of an item of the user's interests", at_least=0, below=1)
    new_session: float = key(0.15, "probability that an item begins a session", at_least=0, at_most=1)
    median_length: float = key(20.0, "median of the lengths of histories", at_least=1)
    length_spread: float = key(0.5, "standard deviation of the logarithms of lengths", at_least=0)


@dataclass(frozen=True)
class ModelSection:
    kind: str = key("dlrm", "which model", choices=MODELS)
    dim: int = key(64, "columns of a row, where its table has none of its own", at_least=1, at_most=2**20)
    bottom: tuple[int, ...] = key((128,), "widths of the hidden layers under the interaction", at_least=1)
    top: tuple[int, ...] = key((256, 128), "widths of the hidden layers above the interaction", at_least=1)
    interaction: str = key("dot", "how the embeddings of a sample meet", choices=INTERACTIONS)
    cross_layers: int = key(3, "layers of the cross network, where interaction is cross", at_least=1)
    cross_rank: int = key(512, "rank of its matrices", at_least=1)
    max_length: int = key(200, "of hstu and fuxi, as all below: most items of a history", at_least=1, below=2**12)
    num_layers: int = key(2, "layers of attention", at_least=1)
    num_heads: int = key(1, "heads of a layer", at_least=1)
    dim_qk: int = key(50, "width of queries and keys of a head", at_least=1)
    dim_v: int = key(50, "width of values of a head", at_least=1)
    dropout: float = key(0.2, "share of elements left out in training", at_least=0, below=1)
    ffn_multiply: int = key(1, "of fuxi: width of the hidden layer, in dims", at_least=1)
    num_negatives: int = key(128, "items that a next item is told from", at_least=1)
    negatives_per: str = key("position", "negatives for each position, or shared by a sample", choices=NEGATIVES_PER)
    temperature: float = key(0.05, "what scores are divided by", above=0)


@dataclass(frozen=True)
class TableSection:
    """One of [[tables]]: what is different about a table of the data."""

    name: str = field(metadata={"key": Key("of a table of the data")})
    dim: int | None = key(None, "columns of a row; not set: model.dim", at_least=1, at_most=2**20)
    init: str = key("normal", "distribution of initial rows", choices=INITS)
    init_scale: float = key(0.02, "standard deviation; uniform: largest magnitude; constant: the value", at_least=0)
    optimizer: str | None = key(None, "row optimizer; not set: row_optimizer.kind", choices=ROW_OPTIMIZERS)
    lr: float | None = key(None, "learning rate; not set: row_optimizer.lr", above=0)
    num_keys: int | None = key(None, "keys are 0 .. num_keys - 1; not set: any", at_least=1)
    max_rows: int | None = key(None, "most rows on one rank; not set: 2^32 - 2", at_least=1, at_most=MOST_ROWS)
    frozen: bool = key(False, "never updated")


@dataclass(frozen=True)
class RowOptimizerSection:
    kind: str | None = key(None, "how rows change; not set: adagrad, of hstu and fuxi adam", choices=ROW_OPTIMIZERS)
    lr: float | None = key(None, "learning rate; not set: 0.05, of hstu and fuxi that of the dense optimizer", above=0)
    weight_decay: float = key(0.0, "on the rows of the batch only", at_least=0)
    initial_accumulator: float = key(0.0, "what the sum of squares of the two Adagrads starts from", at_least=0)
    betas: tuple[float, float] | None = key(
        None, "of Adam; not set: 0.9, 0.999, of hstu and fuxi those of the dense optimizer", at_least=0, below=1
    )
    eps: float | None = key(None, "added to the denominator; not set: the optimizer's own", at_least=0)


@dataclass(frozen=True)
class DenseOptimizerSection:
    kind: str = key("adam", "how the dense parameters change", choices=DENSE_OPTIMIZERS)
    lr: float = key(1e-3, "learning rate", above=0)
    weight_decay: float = key(0.0, "weight decay", at_least=0)
    betas: tuple[float, float] = key((0.9, 0.999), "of Adam and AdamW", at_least=0, below=1)
    clip_norm: float | None = key(None, "largest norm of the dense gradients together; not set: any", above=0)
    clip_rows: bool = key(False, "gradients of rows count in clip_norm and are scaled with the others")
    warmup_steps: int = key(0, "steps in which the dense learning rate rises to its value", at_least=0)


@dataclass(frozen=True)
class TrainSection:
    steps: int = key(300, "steps to train", at_least=0)
    seed: int = key(0, "of the initial rows and dense parameters", at_least=0)
    batch_size: int = key(2048, "samples in a batch of one rank", at_least=1)
    deterministic: bool = key(True, "fixed-order dense kernels; false permits faster ones")
    precision: str = key(
        "float32", "of the dense model, where torch deems it safe; rows keep theirs", choices=PRECISIONS
    )
    compiled: bool = key(False, "the dense model by torch.compile(dynamic=True)")


@dataclass(frozen=True)
class PipelineSection:
    schedule: str = key("nested", "when each thing happens; the bits are the same", choices=SCHEDULES)
    num_micro_batches: int = key(1, "parts of a batch", at_least=1)
    check_split: bool = key(True, "refuse a model whose loss depends on how the batch is cut")
    stale: bool = key(False, "wrong, for experiments: show the model shared rows as before the last update")


@dataclass(frozen=True)
class ExchangeSection:
    window: str = key("once", "a row travels once a batch, or again in each micro-batch", choices=WINDOWS)


@dataclass(frozen=True)
class ClusterSection:
    method: str = key("spectral", "how samples that share keys find together in a micro-batch", choices=CLUSTER_METHODS)
    cost: str = key("keys", "what micro-batches are balanced by: a sample's keys, or the square", choices=CLUSTER_COSTS)


@dataclass(frozen=True)
class StoreSection:
    num_threads: int | None = key(
        None, "threads of the host store; not set: cores // ranks on this host", at_least=1, at_most=MOST_THREADS
    )


@dataclass(frozen=True)
class RuntimeSection:
    dense_threads: int | None = key(
        None,
        "threads of the dense part; not set: cores // ranks on this host, or 1 if it is on an accelerator",
        at_least=1,
        at_most=MOST_THREADS,
    )
    device: str | None = key(None, "of the model, as torch names it; not set: the accelerator if there is one, or cpu")


@dataclass(frozen=True)
class DistributedSection:
    timeout_seconds: float = key(25.0, "without a sign of life, after which a rank is given up", above=0)
    stall_seconds: float = key(600.0, "without any progress, after which a rank that others wait for hangs", above=0)
    backend: str = key("auto", "of device memory; auto: nccl if each rank has a device of its own", choices=BACKENDS)


@dataclass(frozen=True)
class MemorySection:
    device_budget_bytes: int | None = key(
        None, "of the device, for a rank's embeddings; a batch that needs more is refused; not set: any", at_least=1
    )


@dataclass(frozen=True)
class EvaluateSection:
    num_samples: int = key(65536, "held-out samples; 0: no evaluation", at_least=0)
    batch_size: int | None = key(None, "samples in a batch of one rank; not set: train.batch_size", at_least=1)
    split: str | None = key(
        None,
        "of prepared data; not set: validation, or test of histories where no evaluation chooses a model",
        choices=("validation", "test"),
    )
    every: int = key(0, "steps between evaluations while training; 0: only at the end", at_least=0)
    metric: str = key("loss", "the number of an evaluation that patience and checkpoint.best go by")
    patience: int = key(0, "evaluations in a row without improvement that end the training; 0: none do", at_least=0)


@dataclass(frozen=True)
class PublishedSection:
    """What others have reached with the settings of this recipe; shown beside the run's own numbers."""

    hr_at_10: float | None = key(None, "published hit rate", at_least=0, at_most=1)
    ndcg_at_10: float | None = key(None, "published NDCG", at_least=0, at_most=1)
    auc: float | None = key(None, "published AUC", at_least=0, at_most=1)
    log_loss: float | None = key(None, "published log loss", at_least=0)


@dataclass(frozen=True)
class LoggingSection:
    every: int = key(10, "steps between progress lines where output is no terminal", at_least=1)


@dataclass(frozen=True)
class CheckpointSection:
    dir: str | None = key(None, "folder of the checkpoints; a run resumes from what is there; not set: none is written")
    every: int = key(0, "steps between checkpoints; 0: only at the end", at_least=0)
    best: str | None = key(None, "folder for the model of the best evaluation while training; not set: none is kept")
    load: str | None = key(None, "checkpoint to start from while checkpoint.dir has none; not set: a new model")


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
    exchange: ExchangeSection = ExchangeSection()
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
        """Whether evaluations while training decide which model the run ends with, or keeps."""
        return self.evaluate.patience > 0 or self.checkpoint.best is not None

    def resolved(self, ranks_on_host: int, cores: int) -> "Config":
        """With what the bits of a run depend on, so that it is saved with it: threads, device, the row optimizer."""
        num_threads = min(max(1, cores // ranks_on_host), MOST_THREADS)
        store, runtime = self.store, self.runtime
        if store.num_threads is None:
            store = replace(store, num_threads=num_threads)
        if runtime.device is None:
            runtime = replace(runtime, device=default_device())
        if runtime.dense_threads is None:
            # Beside an accelerator only small operations are left, which take longer if they wait for other threads.
            runtime = replace(runtime, dense_threads=num_threads if runtime.device == "cpu" else 1)
        return replace(self, store=store, runtime=runtime, row_optimizer=self._row_optimizer())

    def _row_optimizer(self) -> RowOptimizerSection:
        rows, dense = self.row_optimizer, self.dense_optimizer
        kind, lr, betas = "adagrad", 0.05, (0.9, 0.999)
        if self.model.kind in SEQUENCE_MODELS:
            kind, lr, betas = "adam", dense.lr, dense.betas
        return replace(rows, kind=rows.kind or kind, lr=rows.lr or lr, betas=rows.betas or betas)
