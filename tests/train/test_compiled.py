"""A compiled model trains as the plain one does, whatever features it reads.

Fails, for example, if TraceableEmbeddings counts columns from 1, if `_common_length` returns 3 for all sequences, or
if the Trainer hands Embeddings themselves to the compiled model.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import nestpipe
from nestpipe.models import DLRM
from nestpipe.optim import SGD, Adagrad
from tests.forked import run_forked

LENGTH = 3


class Reads(nn.Module):
    """Reads every kind of feature: pooled of two dims, sequences by values, padded and by index."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.randn(26, 1, generator=generator))

    def forward(self, embeddings, inputs) -> Tensor:
        pooled = [embeddings[name] for name in embeddings if isinstance(embeddings[name], Tensor)]
        fixed = embeddings["fixed"].padded(LENGTH).sum(1)
        jagged = embeddings["jagged"]
        mean = jagged.padded(LENGTH).sum(1) / jagged.lengths.clamp(min=1)[:, None]
        last = jagged.values.sum(0, keepdim=True).expand(len(fixed), -1) * 0.01
        chosen = embeddings["chosen"]
        by_index = nn.functional.embedding(chosen.index, chosen.rows)
        wide = embeddings.side_by_side(["a", "b"])
        assert wide.shape[1] == 8
        x = torch.cat([*pooled, wide.relu(), fixed, mean + last, by_index], dim=1)
        return (torch.tanh(x @ self.weight).squeeze(1) - inputs["label"]).square().sum()


def features() -> dict[str, nestpipe.Pooled | nestpipe.Sequence]:
    narrow, other, wide = (
        nestpipe.Table(name, dim=dim, optimizer=optimizer)
        for name, dim, optimizer in (("t", 4, SGD(0.1)), ("u", 4, SGD(0.1)), ("w", 2, Adagrad(0.1)))
    )
    return {
        "a": nestpipe.Pooled(narrow),
        "c": nestpipe.Pooled(wide, "mean"),
        "b": nestpipe.Pooled(other),
        "fixed": nestpipe.Sequence(wide),
        "jagged": nestpipe.Sequence(narrow),
        "chosen": nestpipe.Sequence(wide, by_index=True),
    }


def batches(number: int) -> list[nestpipe.Batch]:
    generator = torch.Generator().manual_seed(2)

    def lists(least: int, most: int, num_samples: int) -> nestpipe.Jagged:
        lengths = torch.randint(least, most + 1, (num_samples,), generator=generator).tolist()
        return nestpipe.Jagged.from_lists(
            [torch.randint(0, 40, (length,), generator=generator).tolist() for length in lengths]
        )

    made = []
    for i in range(number):
        n = 10 + 2 * (i % 3)
        keys = {"a": lists(0, 3, n), "b": lists(1, 1, n), "c": lists(0, 5, n), "jagged": lists(0, 4, n)}
        keys |= {"fixed": lists(LENGTH, LENGTH, n), "chosen": lists(1, 1, n)}
        made.append(nestpipe.Batch(keys, {"label": torch.rand(n, generator=generator)}))
    return made


def trained(schedule: str, compiled: bool) -> tuple[str, list[float]]:
    trainer = nestpipe.Trainer(
        Reads(),
        features(),
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05),
        world=nestpipe.World(),
        schedule=schedule,
        compiled=compiled,
        check_split=False,
    )
    result = trainer.fit(batches(6))
    return trainer.digest(), result.losses


class Graphs:
    """A compiler that runs what it is given as it is, and counts."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        self.number += 1
        return module.forward


def counting_compiler() -> Graphs:
    """Replaces torch's compiler in this process."""
    graphs, compile_model = Graphs(), torch.compile
    torch.compile = lambda model, dynamic: compile_model(model, dynamic=dynamic, backend=graphs)
    return graphs


def in_own_process(function: Callable[[], None]) -> None:
    """Calls a test in a process of its own: torch.compile imports Triton, after which no kernel runs in Triton's
    interpreter."""
    done = run_forked(function, timeout=250.0)
    assert done.returncode == 0, done.stderr


def learn_the_same() -> None:
    graphs = counting_compiler()
    _, losses = trained("nested", compiled=True)
    _, plain = trained("nested", compiled=False)
    torch.testing.assert_close(losses, plain, rtol=1e-6, atol=0)
    assert graphs.number > 0


@pytest.mark.slow
def test_a_compiled_model_learns_the_same() -> None:
    """With a compiler that changes nothing. Rows that a model reads in three ways may get their gradients added up in
    another order."""
    in_own_process(learn_the_same)


def compile_in_one_piece() -> None:
    graphs = counting_compiler()
    data = [
        nestpipe.Batch(
            {name: batch.keys[name] for name in ("a", "b")},
            {"dense": torch.rand(len(batch), 1), "click": torch.ones(len(batch))},
        )
        for batch in batches(4)
    ]
    two = {name: feature for name, feature in features().items() if name in ("a", "b")}
    trainer = nestpipe.Trainer(
        DLRM(1, ("a", "b"), 4, (8,), (8,)),
        two,
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
        world=nestpipe.World(),
        compiled=True,
    )
    trainer.fit(data)
    assert graphs.number == 1


def test_pooled_features_are_compiled_in_one_piece() -> None:
    """A model that reads pooled features alone is one graph, for all sizes of batches."""
    in_own_process(compile_in_one_piece)


def agree_when_compiled() -> None:
    digest, losses = trained("serial", compiled=True)
    assert trained("nested", compiled=True) == (digest, losses)
    _, plain = trained("serial", compiled=False)
    torch.testing.assert_close(losses, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_schedules_agree_when_compiled() -> None:
    """With torch's own compiler, which changes the dense part's bits, but in every schedule alike."""
    in_own_process(agree_when_compiled)
