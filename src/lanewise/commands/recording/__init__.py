"""Records the steps of a run, and compares what two recordings have of them."""
