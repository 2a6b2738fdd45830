"""`bench planner`: the number of micro-batches that is chosen, against brute force."""
