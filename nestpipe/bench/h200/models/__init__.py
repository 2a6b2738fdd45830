"""Part models of `bench h200`: models that nobody tuned, on one accelerator, against their dense part alone and against
plain torch with all rows in device memory."""
