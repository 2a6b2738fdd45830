"""Tests of the command line start processes, each of which takes seconds to import torch on a busy machine."""

from pathlib import Path

import pytest

LIMIT_SECONDS = 150


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_SECONDS))
