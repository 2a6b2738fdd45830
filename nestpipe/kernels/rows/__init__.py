"""Operations on rows in device memory: copies, sums over segments, pooling, row optimizers."""
