"""`bench checkpoint`: speed of saves and loads relative to the disk, and what a save costs while training goes on."""
