"""Samples in Parquet and Arrow files: a user's own, or those of a prepared folder."""
