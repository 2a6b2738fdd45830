"""Rows that the model reads where they are stored.

test_device_dedup.py compares features of such rows with those of host memory; it fails if padding is told by the length
of the array instead of the number of rows.
"""

import pytest
import torch

from nestpipe.embedding.model_rows import ModelRows
from nestpipe.kernels.rows.pooling import StoredRows


def test_all_rows_are_copied_when_asked_for() -> None:
    """Fails if `tensor` returns the variable without filling it."""
    array, places = torch.arange(12.0).view(4, 3), torch.tensor([3, 0])
    rows = ModelRows.read_at(StoredRows(array, places), 2)
    rows.variable.requires_grad_()
    assert rows.tensor is rows.variable
    assert rows.tensor.tolist() == [[9.0, 10.0, 11.0], [0.0, 1.0, 2.0]]
    array.zero_()  # the copy is the model's own
    (rows.tensor * 2).sum().backward()
    assert rows.tensor[0].tolist() == [9.0, 10.0, 11.0]
    gradient = rows.take_gradient()
    assert gradient is not None
    assert gradient.tolist() == [[2.0] * 3] * 2
    assert rows.variable.grad is None


def test_rows_in_order_are_the_first_of_the_array() -> None:
    rows = ModelRows.read_at(StoredRows(torch.arange(12.0).view(4, 3), None), 2)
    assert rows.tensor.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_rows_are_not_read_after_their_backward() -> None:
    """The update may have changed them. Fails if take_gradient does not end the rows."""
    rows = ModelRows.read_at(StoredRows(torch.ones(4, 3), None), 2)
    rows.take_gradient()
    for read in ("tensor", "stored"):
        with pytest.raises(RuntimeError, match="asked for after its backward; read them before"):
            getattr(rows, read)
