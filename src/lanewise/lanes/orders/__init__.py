"""The orders in which an epoch visits its samples, a file each."""
