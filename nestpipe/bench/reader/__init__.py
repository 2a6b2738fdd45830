"""`bench reader`: samples that one core reads from files."""
