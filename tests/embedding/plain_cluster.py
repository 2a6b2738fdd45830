"""The clustering of csrc/src/cluster.cpp in plain Python, slow: the same operations in the same order of addition."""

from collections import Counter
from collections.abc import Iterable, Sequence

from nestpipe.store.oracle_values import mix64

Lists = Sequence[Sequence[int]]
"""Numbers of the keys of each sample, feature by feature; negative for padding."""

END_COST, MOST_OVERLOAD = 0.45, 1.05
MASK = 2**64 - 1


def cluster(lists: Lists, cost: list[float], num_parts: int, method: str, seed: int) -> list[list[int]]:
    keys = [list(dict.fromkeys(key for key in keys if key >= 0)) for keys in lists]
    uses = Counter(key for sample_keys in keys for key in sample_keys)
    number = {key: i for i, key in enumerate(sorted(key for key in uses if uses[key] > 1))}
    shared = [[number[key] for key in sample_keys if key in number] for sample_keys in keys]
    rarity = [add(1.0 / uses[key] for key in sample_keys) for sample_keys in keys]
    order = by_spectrum(shared, seed) if method == "spectral" else by_minhash(shared, seed)
    part, target, most = cut_into_parts(order, rarity, cost, num_parts)
    if method == "spectral":
        for _ in range(2):
            refine(shared, cost, part, target, most)
    return [[sample for sample in range(len(lists)) if part[sample] == p] for p in range(num_parts)]


def add(values: Iterable[float]) -> float:
    """Adds one value after another: `sum` of floats compensates errors in newer Pythons."""
    total = 0.0
    for value in values:
        total += value
    return total


def by_spectrum(shared: Lists, seed: int) -> list[int]:
    uses = Counter(key for keys in shared for key in keys)
    x = [(mix64(mix64(seed) + s & MASK) >> 11) * 2.0**-52 - 1.0 for s in range(len(shared))]
    for _ in range(5):
        if not uses:
            return list(range(len(shared)))
        mean = add(len(keys) * value for keys, value in zip(shared, x, strict=True)) / sum(uses.values())
        x = [value - mean if keys else 0.0 for keys, value in zip(shared, x, strict=True)]
        largest = max(map(abs, x))
        if not largest > 1e-30:
            break
        x = [value / largest for value in x]
        key_values = dict.fromkeys(uses, 0.0)
        for keys, value in zip(shared, x, strict=True):
            for key in keys:
                key_values[key] += value
        key_values = {key: value / uses[key] for key, value in key_values.items()}
        x = [
            add(key_values[key] for key in keys) / len(keys) if keys else value
            for keys, value in zip(shared, x, strict=True)
        ]
    return sorted(range(len(shared)), key=lambda s: (x[s], s))


def by_minhash(shared: Lists, seed: int) -> list[int]:
    salts = [mix64(mix64(seed) + h & MASK) for h in range(3)]

    def smallest(sample: int) -> list[int]:
        return [min((mix64(salt ^ key) for key in shared[sample]), default=MASK) for salt in salts]

    return sorted(range(len(shared)), key=lambda s: (smallest(s), s))


def cut_into_parts(
    order: list[int], rarity: list[float], cost: list[float], num_parts: int
) -> tuple[list[int], list[float], list[float]]:
    """Returns the part of each sample, and the target cost and largest cost of each part."""
    total = add(cost)
    part = [-1] * len(cost)

    def cut(samples: list[int], sum_of_cost: float, parts: list[int]) -> None:
        before = 0.0
        for s in samples:
            number = int((before + cost[s] / 2) / sum_of_cost * len(parts))
            part[s] = parts[min(number, len(parts) - 1)]
            before += cost[s]

    if num_parts < 3:
        cut(order, total, list(range(num_parts)))
        return part, [total / num_parts] * num_parts, [total / num_parts * MOST_OVERLOAD] * num_parts
    between = total / (num_parts - 2 + 2 * END_COST)
    end = between * END_COST
    at_end, end_total = set(), 0.0
    for s in sorted(order, key=lambda s: (rarity[s] / cost[s], s)):
        if end_total + cost[s] <= 2 * end:
            end_total += cost[s]
            at_end.add(s)
    cut([s for s in order if s in at_end], end_total, [0, num_parts - 1])
    cut([s for s in order if s not in at_end], total - end_total, list(range(1, num_parts - 1)))
    inner = num_parts - 2
    return part, [end, *[between] * inner, end], [end, *[between * MOST_OVERLOAD] * inner, end]


def refine(shared: Lists, cost: list[float], part: list[int], target: list[float], most: list[float]) -> None:
    """Moves samples to better parts, in place."""
    uses = Counter((key, part[s]) for s, keys in enumerate(shared) for key in keys)
    for s, keys in enumerate(shared):
        own = part[s]
        uses.subtract((key, own) for key in keys)
        load = loads(cost, part, s, len(target))
        worth = {
            p: sum(uses[key, p] > 0 for key in keys) - len(keys) * (load[p] / target[p] - 1)
            for p in range(len(target))
            if load[p] + cost[s] <= most[p]
        }
        if worth:
            part[s] = max(worth, key=lambda p: (worth[p], p == own, -p))
        uses.update((key, part[s]) for key in keys)


def loads(cost: list[float], part: list[int], without: int, num_parts: int) -> list[float]:
    """Returns the cost of each part. Costs are whole numbers, so the order of addition does not matter."""
    return [add(c for s, c in enumerate(cost) if part[s] == p and s != without) for p in range(num_parts)]
