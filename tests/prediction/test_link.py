"""The network as a fluid. Fails if collectives that run at the same time do not share it equally."""

import pytest

from nestpipe.prediction.link import Link


def test_alone_and_shared() -> None:
    link = Link()
    link.add(0, 10.0, 5.0)
    assert link.next_end() == (0, pytest.approx(15))
    link.add(1, 20.0, 4.0)
    link.add(2, 22.0, 1.0)
    link.add(3, 22.0, 5.0)
    # 1 is alone for 2; three share from 22 until 2 has had its 1; two share from 25 until 1 has had its 4.
    assert link.next_end() == (2, pytest.approx(25))
    assert link.next_end() == (1, pytest.approx(27))
    assert link.next_end() == (3, pytest.approx(30))
    assert not link.is_busy


def test_without_transfer() -> None:
    link = Link()
    link.add(0, 0.0, 10.0)
    link.add(1, 4.0, 0.0)
    assert link.next_end() == (1, pytest.approx(4))
    assert link.next_end() == (0, pytest.approx(10))
