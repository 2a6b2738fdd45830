"""`bench cluster`: clustering against the given order and against recursive bisection."""
