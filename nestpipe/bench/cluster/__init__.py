"""`bench cluster`: clustering against recursive bisection."""
