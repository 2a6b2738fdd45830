"""Sentences of the page of `bench paper`, between its tables."""

HEAD = """
# The paper's tables at a small scale

The method is that of *NestPipe: Large-Scale Recommendation Training on 1,500+ Accelerators via Nested Pipelining*
([arXiv 2604.06956](https://arxiv.org/abs/2604.06956)). Its results are for HSTU on industrial data with 1,536
accelerators. `nestpipe bench paper --json FILE --report FOLDER` measures the counterparts on one machine and writes
this page; `nestpipe bench report` writes it anew from [benchmarks/results](../benchmarks/results). An empty cell stands
for a figure that is not published, or not on record.

Figures under "2 ranks" come from `paper.json`. Hosts are network namespaces with a rank and a thread each, joined by a
real link of limited rate. Dense compute and reads of the store are **paced**: they take time but no processor. So
lookup, exchange and compute do not compete for two cores, just as they do not compete on large machines. Figures under
"H200" are read from the results on record of `bench h200`. Everything is a median of interleaved rounds.
"""

END_TO_END = """
## End to end

The paces are chosen so that serial's step has the published shares: 50% lookup, 21% exchange. Batches have 512 samples
of synthetic histories, rows have 256 columns, a batch is 8 micro-batches, and the link has 1 Gbit/s. What differs in
all rows: 2 ranks instead of 1,536 accelerators, synthetic histories, and compute that sleeps. Half of a batch's samples
are also in the previous batch; how many keys the published batches share is not known. On the H200
(`h200-four-ranks.json`) four ranks share one device, 16 cores and one memory; their compute is a stack of linear layers
with the same shares.
"""

OVER_DENSE = """
The same step, divided by its dense compute. What differs: one rank exchanges nothing, so that only the lookup is left
to hide. On the H200 (`h200-one-rank.json`) the dense model is HSTU, unsplit, and the price of splitting it into 8
micro-batches is in the ratio.
"""

SHARES = """
## Ablation

Exposed lookup and exchange, relative to those of serial: the inter-batch pipeline hides the lookup, the intra-batch
pipeline hides the exchange, nested hides both. What differs is the same as above.
"""

MICRO_BATCHES = """
## Micro-batch size

Nested with smaller and smaller micro-batches, against the unsplit batch of 512 (the schedule inter). Bytes and exchange
time grow if a row travels with every micro-batch that uses it (`exchange.window = "resend"`). Clustering puts samples
that share keys together, and the window `once` sends a row only with the first micro-batch that uses it. The published
time is that of the naive split into micro-batches of 16. What differs: the keys, hence how many of them a split
repeats; the window `once` is not in the paper.
"""

ROBUSTNESS = """
## Row dim, layers, sequence length

The paper calls the method robust over these ranges. The step is divided by the time of the dense model alone on
resident rows, unsplit. What differs under "2 ranks": an HSTU computes for real, on a core for each rank; dims and
lengths are a quarter of the published ones; batches keep 4,096 tokens, the link has 300 Mbit/s, and a batch is 4
micro-batches, whose price is in the ratio. What differs on the H200 (`h200-robustness.json`): one rank, which exchanges
nothing, trains in one micro-batch with 8M rows in host memory; batches of longer sequences have fewer samples. The base
case is written as row dim / layers / length.
"""

RANKS = """
## Numbers of ranks

Every rank has a batch of its own, so with perfect scaling a step takes as long on 4 ranks as on one. What differs: 1, 2
and 4 ranks instead of 128 and 1,536, with the paces from above. One rank exchanges nothing. Here the lookup of a rank
does not grow with the number of ranks, as it did in the published runs (from 24% to 50% of serial's step).
"""

END = """
## What has no counterpart

2D sparse parallelism is not part of nestpipe. `bench consistency` compares the quality of models, HR and NDCG, with
synchronous training. FuXi on KuaiRand-27K with 128 GPUs, published as 1.36 times as fast, needs the data set and the
machines.
"""
