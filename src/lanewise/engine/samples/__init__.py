"""Which samples this process reads, and in which order."""
