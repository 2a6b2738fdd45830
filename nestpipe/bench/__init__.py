"""Benchmarks: named records, the environment they were measured in, and the targets they must meet."""
