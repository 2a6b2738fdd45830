"""When each thing happens."""
