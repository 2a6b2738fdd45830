"""Settings for all tests: Ctrl-C interrupts even a shell's background job, which would ignore it; stages run on their
lanes, however small a test's batches are; no name server is asked; tests that time other processes are marked; torch's
settings are reset after each test."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from nestpipe.pipelining import light
from tests import ranks

# For its log, torch looks up the name of each address that ranks connect to, and a name server that drops a request
# delays them by 5 s.
os.environ |= {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
signal.signal(signal.SIGINT, signal.default_int_handler)
light.LIGHT_SECONDS = 0.0

TIMED = ("errors", "distributed")
"""Folders whose tests give other processes seconds to answer."""
UNTIMED = (
    *("test_agreed.py", "test_backend.py", "test_channel.py", "test_environment.py", "test_issuer.py"),
    "test_shared_memory.py",
)
"""Files of these folders that do not, or mark those of their tests that do."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    ranks.limit_seconds = 170.0 if item.get_closest_marker("slow") else 50.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in TIMED and item.path.name not in UNTIMED:
            item.add_marker(pytest.mark.alone)


@pytest.fixture(autouse=True)
def _torch_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    if torch.are_deterministic_algorithms_enabled():  # switching it imports the compiler, which takes seconds
        torch.use_deterministic_algorithms(False)
