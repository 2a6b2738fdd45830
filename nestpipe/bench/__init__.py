"""Benchmarks: one module or folder each, which declares its command. They yield records and have targets to meet."""
