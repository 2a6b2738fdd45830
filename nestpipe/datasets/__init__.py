"""Published data sets: finds their files, prepares them for training, generates files in their formats."""
