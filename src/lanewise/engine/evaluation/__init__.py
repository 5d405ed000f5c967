"""The evaluation of a model, and when a run evaluates and ends early."""
