"""`bench consistency`: what schedules, and stale rows, do to the quality of a model."""
