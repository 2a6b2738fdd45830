"""`bench faults`: runs that are killed, stopped or damaged in every way, started again, and compared with one that was
left alone."""
