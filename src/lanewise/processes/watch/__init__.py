"""Failure: where each process is, what went wrong first, and who keeps the others waiting."""
