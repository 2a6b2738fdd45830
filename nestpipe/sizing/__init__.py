"""What a recipe needs on a number of workers: memory, and the time of a step."""
