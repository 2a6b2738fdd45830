"""`bench schedules`: every schedule against serial, with large and with small batches."""
