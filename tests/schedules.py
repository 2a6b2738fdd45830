"""Schedules for tests that would take too long with all of them."""

import pytest

from nestpipe.pipelining.schedule import SCHEDULES

OUTER = [
    pytest.param(schedule, marks=() if schedule in ("serial", "nested") else pytest.mark.slow) for schedule in SCHEDULES
]
"""serial and nested, which has the lanes of all others, in `make test`; all in `make test-slow`."""

NESTED = [pytest.param(schedule, marks=() if schedule == "nested" else pytest.mark.slow) for schedule in SCHEDULES]
"""Only the default in `make test`, for cases that take seconds; all in `make test-slow`."""
