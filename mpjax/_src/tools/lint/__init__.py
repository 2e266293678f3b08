"""`lint`: finds silent precision faults in any program, under autocast or not."""
