"""Takes steps of a run again, from a checkpoint of it, and compares them with what the run wrote."""
