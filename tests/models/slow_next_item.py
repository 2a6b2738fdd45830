"""HSTU and FuXi one number at a time, written from their equations. torch is used for autograd only."""

import math

import torch
from torch import Tensor

from nestpipe.data.batch import Batch

Vector = list[Tensor]
Parameters = dict[str, Tensor]


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def dot(x: Vector, y: Vector) -> Tensor:
    assert len(x) == len(y)
    total = torch.zeros((), dtype=torch.float64)
    for a, b in zip(x, y, strict=True):
        total = total + a * b
    return total


def times_matrix(x: Vector, w: Tensor) -> Vector:
    """Returns x W, with W [len(x), width]."""
    columns = [list(column) for column in w.t()]
    return [dot(x, column) for column in columns]


def layer_norm(x: Vector) -> Vector:
    mean = sum(x) / len(x)
    variance = sum((a - mean) ** 2 for a in x) / len(x)
    return [(a - mean) / torch.sqrt(variance + 1e-6) for a in x]


def rms_norm(x: Vector) -> Vector:
    return [a / torch.sqrt(sum(b**2 for b in x) / len(x) + 1e-6) for a in x]


def split(x: Vector, widths: list[int]) -> list[Vector]:
    parts, first = [], 0
    for width in widths:
        parts.append(x[first : first + width])
        first += width
    assert first == len(x)
    return parts


def bucket(difference: int) -> int:
    return min(int(math.log(max(abs(difference), 1)) / 0.301), 128)


class Layer:
    """One layer on one sample. times has one more number than there are positions."""

    def __init__(
        self, parameters: Parameters, number: int, max_length: int, heads: int, dim_qk: int, dim_v: int
    ) -> None:
        prefix = f"layers.{number}."
        self.p = {name[len(prefix) :]: value for name, value in parameters.items() if name.startswith(prefix)}
        self.max_length, self.heads, self.dim_qk, self.dim_v = max_length, heads, dim_qk, dim_v

    def project(self, xs: list[Vector], norm, num_gates: int) -> list[list[Vector]]:
        """Returns u, v, q, k for each position."""
        h = self.heads
        widths = [num_gates * h * self.dim_v, h * self.dim_v, h * self.dim_qk, h * self.dim_qk]
        return [split([silu(z) for z in times_matrix(norm(x), self.p["w_uvqk"])], widths) for x in xs]

    def head_part(self, x: Vector, head: int, dim: int) -> Vector:
        return x[head * dim : (head + 1) * dim]

    def by_position(self, i: int, j: int) -> Tensor:
        return self.p["w_pos"][self.max_length - 1 + j - i]

    def by_time(self, times: list[int], i: int, j: int) -> Tensor:
        return self.p["w_ts"][bucket(times[i + 1] - times[j])]

    def score(self, projected, i: int, j: int, head: int) -> Tensor:
        q, k = projected[i][2], projected[j][3]
        return dot(self.head_part(q, head, self.dim_qk), self.head_part(k, head, self.dim_qk))

    def attend(self, projected, i: int, head: int, weight) -> Vector:
        total = [torch.zeros((), dtype=torch.float64)] * self.dim_v
        for j in range(i + 1):
            v = self.head_part(projected[j][1], head, self.dim_v)
            total = [t + weight(j) * a for t, a in zip(total, v, strict=True)]
        return total


class HstuLayer(Layer):
    def __call__(self, xs: list[Vector], times: list[int]) -> list[Vector]:
        projected = self.project(xs, layer_norm, 1)
        results = []
        for i, x in enumerate(xs):
            attended: Vector = []
            for head in range(self.heads):

                def weight(j: int, i: int = i, head: int = head) -> Tensor:
                    bias = self.by_position(i, j) + self.by_time(times, i, j)
                    return silu(self.score(projected, i, j, head) + bias) / self.max_length

                attended += self.attend(projected, i, head, weight)
            y = [u * a for u, a in zip(projected[i][0], layer_norm(attended), strict=True)]
            out = times_matrix(y, self.p["out.weight"].t())
            results.append([a + b + c for a, b, c in zip(x, out, self.p["out.bias"], strict=True)])
        return results


class FuxiLayer(Layer):
    def __call__(self, xs: list[Vector], times: list[int]) -> list[Vector]:
        projected = self.project(xs, rms_norm, 3)
        results = []
        for i, x in enumerate(xs):
            channels: Vector = []
            for head in range(self.heads):
                channels += self.attend(projected, i, head, lambda j, i=i: self.by_position(i, j))
                channels += self.attend(projected, i, head, lambda j, i=i: self.by_time(times, i, j))
                channels += self.attend(
                    projected,
                    i,
                    head,
                    lambda j, i=i, head=head: silu(self.score(projected, i, j, head)) / self.max_length,
                )
            y = [u * c for u, c in zip(projected[i][0], rms_norm(channels), strict=True)]
            out = times_matrix(y, self.p["w0.weight"].t())
            out = [a + b + c for a, b, c in zip(x, out, self.p["w0.bias"], strict=True)]
            z = rms_norm(out)
            gates, values = times_matrix(z, self.p["w1.weight"].t()), times_matrix(z, self.p["w3.weight"].t())
            hidden = [silu(g) * v for g, v in zip(gates, values, strict=True)]
            results.append([a + b for a, b in zip(out, times_matrix(hidden, self.p["w2.weight"].t()), strict=True)])
        return results


def unit(x: Vector) -> Vector:
    return [a / torch.sqrt(dot(x, x)) for a in x]


def sample_outputs(parameters: Parameters, rows: Tensor, items: list[int], times: list[int], layers) -> list[Vector]:
    dim = rows.shape[1]
    xs = [
        [math.sqrt(dim) * e + p for e, p in zip(rows[item], parameters["positions"][place], strict=True)]
        for place, item in enumerate(items)
    ]
    for layer in layers:
        xs = layer(xs, times)
    return [unit(x) for x in xs]


def loss(parameters: Parameters, rows: Tensor, batch: Batch, layers, per: str) -> tuple[Tensor, list[Vector]]:
    """Returns the loss of the batch, and the vector of each user, [] for an empty history."""
    total, users = torch.zeros((), dtype=torch.float64), []
    for sample in range(len(batch)):
        lists = {
            name: jagged.values[jagged.offsets[sample] : jagged.offsets[sample + 1]].tolist()
            for name, jagged in batch.keys.items()
        }
        items, negatives = lists["history"], lists["negatives"]
        outputs = sample_outputs(parameters, rows, items, batch.inputs["times"][sample].tolist(), layers)
        users.append(outputs[-1] if outputs else [])
        for place, output in enumerate(outputs):
            number = len(negatives) // len(items)
            own = negatives[place * number : (place + 1) * number] if per == "position" else negatives
            positive = (items + lists["target"])[place + 1]
            choices = [positive, *(key for key in own if key != positive)]
            logits = [dot(output, unit(list(rows[key]))) / 0.05 for key in choices]
            total = total - logits[0] + torch.log(sum(torch.exp(logit) for logit in logits))
    return total, users
