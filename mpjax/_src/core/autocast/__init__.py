"""Op-level mixed precision: what a policy asks of a program, and the planned program's calls."""
