"""Looks into checkpoints, in one process and without the program that saved them: inspect, verify, diff, export."""
