"""Sampled softmax in Triton."""
