"""Prints the digests of a matrix of small training runs, one per line.

To check that a change does not alter numbers, run this before and after it on one machine and compare the outputs:
`python -m tests.exactness.same_bits > FILE`. It uses only the public API, so that it runs on any commit.

The matrix has 1, 2 and 3 ranks; every row optimizer and a user's own; 1 and 4 micro-batches; pooled, sequence and
shared features; every clustering; both dtypes. Clipping, schedule and window alternate.
"""

import itertools
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

import nestpipe
from nestpipe import Batch, Jagged, Pooled, Sequence, Table
from nestpipe.embedding.cluster import Clustering
from tests.ranks import run_ranks

optim = getattr(nestpipe, "optim", None) or nestpipe.optim
RowWiseAdagrad = getattr(optim, "RowWiseAdagrad", None) or optim.RowWiseAdagrad

NUM_STEPS = 7
BATCH_SIZE = 13
HUGE_KEYS = (-(2**63), 2**63 - 1, -1, 2**53 + 1)


class Momentum(nestpipe.optim.RowOptimizer):
    """A user's own row optimizer."""

    def state_width(self, dim: int) -> int:
        return dim

    def update(self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        state.mul_(0.9).add_(gradient)
        rows.sub_(state * lr)


def falling(step: int) -> float:
    return 0.05 / step**0.5


OPTIMIZERS = {
    "sgd": lambda: optim.SGD(0.5, weight_decay=0.01),
    "adagrad": lambda: optim.Adagrad(0.1, initial_accumulator=0.1),
    "row_wise_adagrad": lambda: RowWiseAdagrad(0.1, initial_accumulator=0.1),
    "adam": lambda: optim.Adam(falling),
    "own": lambda: Momentum(0.1),
}


class Run(NamedTuple):
    ranks: int
    optimizer: str
    num_micro_batches: int
    layout: str
    clustering: str
    dtype: torch.dtype
    clipping: str
    schedule: str
    window: str


def runs() -> Iterator[Run]:
    matrix = itertools.product(
        (1, 2, 3), OPTIMIZERS, (1, 4), ("pooled", "sequence", "shared"), ("none", "minhash", "spectral"),
        (torch.float32, torch.float64),
    )  # fmt: skip
    kept = (values for values in matrix if values[2] > 1 or values[4] == "none")
    for i, values in enumerate(kept):
        turns = ("none", "dense", "rows")[i % 3], ("serial", "inter", "intra", "nested")[i // 3 % 4]
        yield Run(*values, *turns, ("once", "resend")[i // 2 % 2])


def features_of(run: Run) -> dict[str, Pooled | Sequence]:
    """Returns features with tables of several dims and hyperparameters, some of which form groups."""
    make, init = OPTIMIZERS[run.optimizer], nestpipe.init
    shared, kind = make(), {"dtype": run.dtype}
    tables = [
        Table("zeta", 4, init=init.Normal(0.3), optimizer=shared, **kind),
        Table("beta", 8, init=init.Uniform(-1, 1), optimizer=shared, **kind),
        Table("alpha", 4, init=init.TruncatedNormal(0.5), optimizer=shared, **kind),
        Table("gamma", 4, init=init.Normal(0.2), optimizer=make(), **kind),
        Table("delta", 4, init=init.Normal(0.4), optimizer=shared, frozen=True, **kind),
        Table("eta", 8, init=init.Constant(0.25), optimizer=make(), num_keys=500, **kind),
        Table("theta", 5, init=init.Normal(0.1), optimizer=optim.SGD(0.2), **kind),
    ]
    if run.layout == "pooled":
        features = [
            Pooled(t, ("sum", "mean")[i % 2], padding_key=7 if i % 3 == 0 else None) for i, t in enumerate(tables)
        ]
    elif run.layout == "sequence":
        features = [Sequence(t, padding_key=7 if i % 3 == 0 else None) for i, t in enumerate(tables)]
    else:
        chosen = [tables[i] for i in (0, 2, 0, 1, 2, 0, 5, 4)]
        features = [(Sequence if i % 3 == 1 else Pooled)(t) for i, t in enumerate(chosen)]
    return {f"f{i}": feature for i, feature in enumerate(features)}


def batches_of(run: Run, rank: int) -> list[Batch]:
    """Returns batches with skewed keys, shared keys and huge keys. Some batches are empty, and some ranks end early."""
    features = features_of(run)
    batches = []
    for step in range(NUM_STEPS - (1 if rank == 1 else 0)):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        num_samples = 0 if (step + rank) % 5 == 3 else BATCH_SIZE - step
        keys = {}
        for i, (name, feature) in enumerate(features.items()):
            lengths = torch.randint(0, 4, (num_samples,), generator=generator)
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            values = (torch.rand(int(offsets[-1]), generator=generator) ** 3 * 60).long() + 10 * (step // 2)
            if len(values) > 2 and feature.table.num_keys is None and step % 2 == 0:
                values[i % len(values)] = HUGE_KEYS[i % 4]
            weights = torch.rand(len(values), generator=generator) + 0.5 if i % 4 == 0 else None
            keys[name] = Jagged(values, offsets, weights)
        labels = torch.randint(0, 2, (num_samples,), generator=generator).double()
        batches.append(Batch(keys, {"label": labels}))
    return batches


class Model(nn.Module):
    """Reads every feature separately, in reverse order of name."""

    def __init__(self, dims: dict[str, int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.weights = nn.ParameterDict(
            {
                n: nn.Parameter(torch.randn(d, 6, generator=generator, dtype=torch.float64) * 0.3)
                for n, d in dims.items()
            }
        )
        self.out = nn.Parameter(torch.randn(6, generator=generator, dtype=torch.float64))

    def forward(self, embeddings, inputs) -> Tensor:
        hidden = torch.zeros((), dtype=torch.float64)
        for name in sorted(embeddings, reverse=True):
            value = embeddings[name]
            if not isinstance(value, Tensor):
                value = (value.padded(3) * torch.arange(1, 4)[:, None]).sum(1)
            hidden = hidden + value.double() @ self.weights[name]
        logit = torch.tanh(hidden) @ self.out
        return nn.functional.binary_cross_entropy_with_logits(logit, inputs["label"], reduction="sum")


def train(world: nestpipe.World, run: Run) -> str:
    torch.set_num_threads(1)
    features = features_of(run)
    trainer = nestpipe.Trainer(
        Model({name: feature.table.dim for name, feature in features.items()}),
        features,
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01),
        world=world,
        schedule=run.schedule,
        num_micro_batches=run.num_micro_batches,
        window=run.window,
        clustering=Clustering(run.clustering),
        clip_norm=None if run.clipping == "none" else 0.05,
        clip_rows=run.clipping == "rows",
        seed=3,
    )
    result = trainer.fit(batches_of(run, world.rank))
    assert trainer.num_steps >= NUM_STEPS - 1, trainer.num_steps
    return f"{trainer.digest()} {result.losses[-1].hex()}"


def train_all(world: nestpipe.World) -> list[str]:
    return [train(world, run) for run in runs() if run.ranks == world.size]


def main() -> None:
    lines = {1: train_all(nestpipe.World())}
    for ranks in (2, 3):
        results = run_ranks(ranks, train_all, timeout=1200)
        assert all(result == results[0] for result in results)
        lines[ranks] = results[0]
    for run in runs():
        print(*run, lines[run.ranks].pop(0))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
