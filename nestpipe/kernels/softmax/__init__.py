"""Sampled softmax in Triton and torch."""
