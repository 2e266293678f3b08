"""The training loops of other libraries, in mixed precision."""
