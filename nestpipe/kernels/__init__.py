"""Operations in device memory: kernels in Triton, and the same in plain torch."""
