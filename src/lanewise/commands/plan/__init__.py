"""Says before a training what memory, traffic and time it needs on any number of devices."""
