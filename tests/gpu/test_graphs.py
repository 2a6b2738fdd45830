"""Tests that layers replayed as graphs have the bits of layers launched kernel by kernel.

Fails if Stack does not copy the tiles of a micro-batch to the graph's (`tiles.copy_to(twin)`), if Graph does not clear
padding (`memory[len(rows) :].zero_()`), or if a graph is used again before its backward (`graph.is_in_use`).
"""

import pytest
import torch

from nestpipe.models import HSTU, FuXi, stack
from tests.histories import NUM_ITEMS, Rows, histories

LENGTHS = [[70, 0, 3, 129], [70, 1, 2, 129], [129, 3, 0, 68], [5, 5], [129, 3, 2, 70], [70, 0, 3, 129]]


def losses_and_gradients(model_class, dropout: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = model_class(8, 130, 2, num_heads=2, dim_qk=16, dim_v=16, dropout=dropout).to("cuda")
    rows = torch.randn(NUM_ITEMS, 8, generator=torch.Generator().manual_seed(0)).cuda().requires_grad_()
    results = []
    for number, lengths in enumerate(LENGTHS):
        torch.manual_seed(number)
        batch = histories(lengths, 130, seed=number)
        features = {name: Rows(rows, keys.values.cuda(), keys.offsets.cuda()) for name, keys in batch.keys.items()}
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = model(features, {"times": batch.inputs["times"].cuda()})
        loss.backward()
        results += [loss.detach(), rows.grad.clone(), *(p.grad.clone() for p in model.parameters())]
        with torch.no_grad():  # as an optimizer does: in place
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    torch.use_deterministic_algorithms(False)
    results.append(torch.tensor(model._stack.num_graphs))
    return results


@pytest.mark.parametrize("model_class", [HSTU, FuXi])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_same_bits(device: str, model_class, dropout: float, dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    *replayed, num_graphs = losses_and_gradients(model_class, dropout, dtype)
    monkeypatch.setattr(stack, "MOST_GRAPHS", 0)
    *launched, none = losses_and_gradients(model_class, dropout, dtype)
    assert int(num_graphs) >= 1
    assert int(none) == 0
    for one, other in zip(replayed, launched, strict=True):
        assert torch.equal(one, other)


def test_two_forwards_before_a_backward(device: str) -> None:
    """The second forward finds the graph in use and is launched kernel by kernel, so both gradients are right."""
    model = HSTU(8, 130, 1, num_heads=1, dim_qk=16, dim_v=16, dropout=0.0).to("cuda")
    rows = torch.randn(NUM_ITEMS, 8).cuda().requires_grad_()

    def loss_of(seed: int) -> torch.Tensor:
        batch = histories([70, 20] if seed < 2 else [120, 9], 130, seed=seed)
        features = {name: Rows(rows, keys.values.cuda(), keys.offsets.cuda()) for name, keys in batch.keys.items()}
        return model(features, {"times": batch.inputs["times"].cuda()})

    expected = {}
    for seed in (0, 1, 2, 3, 2, 0, 1):
        rows.grad = None
        loss_of(seed).backward()
        expected[seed] = rows.grad.clone()
    assert model._stack.num_graphs == 2
    for pair in ((0, 1), (0, 2), (2, 1)):  # one size, and two sizes whose graphs share memory
        losses = {seed: loss_of(seed) for seed in pair}
        for seed in reversed(pair):
            rows.grad = None
            losses[seed].backward()
            torch.testing.assert_close(rows.grad, expected[seed])
    loss = loss_of(0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="called twice"):
        loss.backward()
