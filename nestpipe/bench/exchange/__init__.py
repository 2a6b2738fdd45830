"""`bench exchange`: options for large clusters."""
