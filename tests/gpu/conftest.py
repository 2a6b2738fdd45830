"""These tests need an accelerator. Run `python -m pytest tests/gpu` in the source folder on a machine with one."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.accelerator.is_available():
        return
    reason = "needs an accelerator; run `python -m pytest tests/gpu` on a machine with one"
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> str:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return accelerator.type
