"""Why is it slow: measurements of all ranks, and the rank, stage or link that they show to be slow."""
