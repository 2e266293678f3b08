"""What devices can do, and compiling for ones that are not there."""
