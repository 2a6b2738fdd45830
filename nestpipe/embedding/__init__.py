"""Keys in, rows out, gradients back."""

from nestpipe.embedding.features import Embeddings

__all__ = ["Embeddings"]
