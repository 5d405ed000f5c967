"""Defines the state in a checkpoint, and checks whether it fits the run that resumes from it."""
