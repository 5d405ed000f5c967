"""What a checkpoint holds of a run, and whether it fits the run that resumes from it."""
