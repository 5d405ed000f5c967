"""A device and its memory: how it is chosen and used, where that depends on its type."""
