"""The running heart: feeds the core with what happens and does what it answers."""
