"""One training step: run the lanes, sum their gradients, update the weights. Start with `step.py`."""
