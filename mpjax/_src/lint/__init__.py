"""`lint`: silent faults of precision in any program, found without autocast or with it."""
