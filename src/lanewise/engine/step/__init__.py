"""One step: the lanes run, their gradients meet, the weights change; `train_step.py` shows it in order."""
