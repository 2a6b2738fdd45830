"""From a recipe, a TOML file, to a run: reads it, builds the trainer and its data, trains, sums up."""
