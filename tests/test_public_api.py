"""The public names, and the errors of those that moved. Fails if a name of 0.1 is missing in nestpipe._MOVED."""

from importlib import import_module

import pytest

import nestpipe

PUBLIC = {
    *("Table", "Pooled", "Sequence", "Batch", "Jagged", "World", "PipelineOptions", "pipeline", "DenseReducer"),
    *("Trainer", "evaluate", "optim", "init", "__version__"),
}
NAMES_OF_0_1 = {
    *("Batch", "Batches", "DenseReducer", "Embeddings", "Jagged", "NonFiniteError", "Pooled", "RankMetrics"),
    *("RowOptimizer", "Scorer", "Sequence", "Step", "Table", "Trainer", "Validation", "World", "evaluate", "init"),
    *("pipeline", "rows"),
}


def test_public_names() -> None:
    assert set(nestpipe.__all__) == PUBLIC
    assert all(hasattr(nestpipe, name) for name in PUBLIC)


@pytest.mark.parametrize("name", sorted(NAMES_OF_0_1 - PUBLIC))
def test_an_old_name_gives_the_new_one(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"nestpipe.{name} is (nestpipe[\w.]+) since version 0.2") as raised:
        getattr(nestpipe, name)
    place = str(raised.value).split()[2]
    module, _, attribute = place.rpartition(".")
    assert hasattr(import_module(module), attribute)


def test_old_names_of_optim() -> None:
    with pytest.raises(AttributeError, match=r"nestpipe.optim.RowWiseAdagrad since version 0.2"):
        _ = nestpipe.optim.RowwiseAdagrad
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = nestpipe.optim.nothing
