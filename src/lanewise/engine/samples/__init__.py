"""Chooses the samples that this process reads, and their order."""
