"""Finds where two runs part, and why."""
