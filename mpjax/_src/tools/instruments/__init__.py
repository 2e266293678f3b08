"""Reports and tools that explain what precision does to a program."""
