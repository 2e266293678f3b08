"""Op-level mixed precision: the plan of a program, and its rewrite."""
