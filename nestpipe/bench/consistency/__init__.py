"""`bench consistency`: the effect of schedules, and of stale rows, on the quality of a model."""
