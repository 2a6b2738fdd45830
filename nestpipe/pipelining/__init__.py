"""Pipelining: stages, schedules, and the loop over steps."""
