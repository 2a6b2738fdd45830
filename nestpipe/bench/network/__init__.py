"""`bench network`: schedules on hosts that are joined by a slow link."""
