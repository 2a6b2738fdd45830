"""The rows of a micro-batch as the model gets them.

Rows that are on the model's device already are read where they are stored: they do not change while their batch trains.
They are copied only for a model that asks for all rows of a micro-batch, one after another.
"""

import torch
from torch import Tensor

from nestpipe.device.tally import embedding_memory
from nestpipe.kernels.rows.pooling import StoredRows


class ModelRows:
    """The rows of one table group that a micro-batch uses."""

    def __init__(self, variable: Tensor, stored: StoredRows | None = None) -> None:
        """variable: [m, dim], gets the gradients. stored: where the rows are; None if they are in the variable."""
        self.variable = variable
        self._stored = stored
        self._is_over = False

    @staticmethod
    def read_at(stored: StoredRows, num_rows: int) -> "ModelRows":
        """Returns rows that are read where they are stored. Their variable takes no memory, and has no values."""
        array = stored.array if stored.places is not None else stored.array[:num_rows]
        variable = torch.empty_strided((num_rows, array.shape[1]), (0, 1), dtype=array.dtype, device=array.device)
        return ModelRows(variable, StoredRows(array, stored.places))

    @property
    def stored(self) -> StoredRows | None:
        """Returns where the rows are; None if they are in the variable. Raises once they may have changed."""
        if self._stored is not None and self._is_over:
            raise RuntimeError("the rows of a micro-batch were asked for after its backward; read them before")
        return self._stored

    @property
    def tensor(self) -> Tensor:
        """Returns the variable, with the rows in it."""
        if (stored := self.stored) is not None:
            self.variable.data = copy = stored.copied()
            embedding_memory.add(copy)
            self._stored = None
        return self.variable

    def take_gradient(self) -> Tensor | None:
        """Returns the gradient and forgets it. The rows may change from now on."""
        gradient, self.variable.grad = self.variable.grad, None
        self._is_over = True
        return gradient
