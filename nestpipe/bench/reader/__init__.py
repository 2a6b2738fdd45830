"""`bench reader`: how fast one core reads samples from files."""
