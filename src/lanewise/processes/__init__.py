"""The processes of a run: their devices, how they communicate, and how they watch each other."""
