"""Lanes for the user's own training loop."""
