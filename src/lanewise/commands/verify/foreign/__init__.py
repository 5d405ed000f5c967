"""Observes programs that do not use lanewise: the same gradient on one process as on several, or why not."""
