"""Plays the trainer's schedules on a cluster that is described by numbers, and says what a step would take there."""
