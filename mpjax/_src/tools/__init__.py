"""What a person at a desk asks of a program: instruments, lint, hardware figures, the command."""
