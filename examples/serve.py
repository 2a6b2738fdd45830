"""Serves the demo's model without nestpipe: loads what `nestpipe checkpoint export` wrote, and scores a batch.

nestpipe train --set checkpoint.dir=run
nestpipe checkpoint export run --out exported
python examples/serve.py exported
"""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from torch import Tensor, nn


class Rows:
    """The rows of a table in memory, sorted by key. For larger tables, put them into a key-value store."""

    def __init__(self, folder: Path, table: dict) -> None:
        columns = [pq.read_table(folder / file, columns=["key", "row"]) for file in table["files"]]
        keys = np.concatenate([part["key"].to_numpy() for part in columns])
        rows = np.concatenate([chunk.flatten().to_numpy() for part in columns for chunk in part["row"].chunks])
        order = keys.argsort()
        unknown = np.full((1, table["dim"]), table["initial_mean"], rows.dtype)
        self.keys = torch.from_numpy(np.append(keys[order], 0))
        self.rows = torch.from_numpy(np.concatenate([rows.reshape(-1, table["dim"])[order], unknown]))
        self.num_rows = len(keys)

    def __call__(self, keys: Tensor) -> Tensor:
        """Returns the row of each key. A key that was never trained has the mean of initial rows, in the last place."""
        places = torch.searchsorted(self.keys[: self.num_rows], keys)
        is_known = (places < self.num_rows) & (self.keys[places] == keys)
        return self.rows[torch.where(is_known, places, self.num_rows)]


class Server:
    """An exported model. `model` is any plain torch module with the names of the trained one's parameters."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        settings = json.loads((folder / "model.json").read_text())
        self.rows = {name: Rows(folder, table) for name, table in settings["tables"].items()}
        model.load_state_dict(load_file(folder / settings["dense"]))
        self.model = model.eval()

    @torch.no_grad()
    def score(self, keys: dict[str, Tensor], dense: Tensor) -> Tensor:
        """Returns a logit for each sample, which has one key of each table."""
        return self.model({table: self.rows[table](column) for table, column in keys.items()}, dense)


class DLRM(nn.Module):
    """The demo's model in plain torch, with layers of the widths that were exported."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.bottom, self.top = (self._layers(weights, part) for part in ("bottom", "top"))

    @staticmethod
    def _layers(weights: dict[str, Tensor], part: str) -> nn.Sequential:
        names = [name for name in weights if name.startswith(part) and name.endswith("weight")]
        shapes = [weights[name].shape for name in sorted(names, key=lambda name: int(name.split(".")[1]))]
        modules = [module for n_out, n_in in shapes for module in (nn.Linear(n_in, n_out), nn.ReLU())]
        return nn.Sequential(*modules[:-1])

    def forward(self, embeddings: dict[str, Tensor], dense: Tensor) -> Tensor:
        first = self.bottom(dense)
        vectors = torch.stack([first, *(embeddings[name] for name in sorted(embeddings))], dim=1)
        row, column = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)[:, row * vectors.shape[1] + column]
        return self.top(torch.cat([first, products], dim=1)).squeeze(1)


def main(folder: Path) -> Tensor:
    server = Server(folder, DLRM(load_file(folder / "dense.safetensors")))
    generator = torch.Generator().manual_seed(0)
    keys = {}
    for name, rows in server.rows.items():
        keys[name] = rows.keys[torch.randint(rows.num_rows, (8,), generator=generator)]
    dense = torch.rand(8, server.model.bottom[0].in_features, generator=generator)
    scores = server.score(keys, dense).sigmoid()
    print(f"probability of a click for 8 made-up samples: {', '.join(f'{score:.4f}' for score in scores)}")
    return scores


if __name__ == "__main__":
    main(Path(sys.argv[1]))
