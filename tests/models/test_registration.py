"""Tests that the shipped models are registered with the data that they learn from.

Fails if a model loses its decorator or its `learns_from`.
"""

from nestpipe.models import DLRM, HSTU, FuXi
from nestpipe.registry import models


def test_shipped_models() -> None:
    shipped = {entry.name: entry.value for entry in models.entries() if entry.is_shipped}
    assert shipped.items() >= {"dlrm": DLRM, "hstu": HSTU, "fuxi": FuXi}.items()
    assert (DLRM.learns_from, HSTU.learns_from, FuXi.learns_from) == ("clicks", "histories", "histories")
    assert all(model.learns_from in ("clicks", "histories") for model in shipped.values())


def test_each_has_a_summary_of_one_line() -> None:
    for entry in models.entries():
        assert 20 < len(entry.summary) < 110, entry
