"""Merges the model's buffers, such as BatchNorm's statistics, that the lanes of a step changed."""
