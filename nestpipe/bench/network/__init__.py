"""`bench network`: schedules between hosts that are joined by a slow link."""
