"""Code that benchmarks share: declaration, paired timing, ranks, network hosts, records, targets, plots."""
