"""Embeddings: keys in, rows out, gradients back."""
