"""What explains precision: reports, culprits, comparisons."""
