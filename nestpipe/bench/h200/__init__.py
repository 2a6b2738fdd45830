"""`bench h200`: whole steps and single stages on one accelerator, with tables in host memory."""
