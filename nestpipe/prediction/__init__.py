"""Predicts the time of a step by playing the lists of operations that the trainer executes, with costs."""
