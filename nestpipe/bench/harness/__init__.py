"""What the benchmarks share: paired timing, ranks, network hosts, records, targets, plots."""
