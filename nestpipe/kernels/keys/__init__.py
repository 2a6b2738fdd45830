"""Operations on the keys of a batch in device memory."""
