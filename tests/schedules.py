"""Which schedules a test runs for, where running all would take long and the two in the middle add little."""

import pytest

from nestpipe.pipelining.schedule import SCHEDULES

OUTER = [
    pytest.param(schedule, marks=() if schedule in ("serial", "nested") else pytest.mark.slow) for schedule in SCHEDULES
]
"""serial and nested, which has the lanes of all others, in `make test`; all in `make test-slow`"""

NESTED = [pytest.param(schedule, marks=() if schedule == "nested" else pytest.mark.slow) for schedule in SCHEDULES]
"""the default alone in `make test`, where a case takes seconds; all in `make test-slow`"""
