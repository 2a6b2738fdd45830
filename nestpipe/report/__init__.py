"""Pictures of a run, from its trace."""
