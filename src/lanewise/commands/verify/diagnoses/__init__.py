"""The causes for which devices compute different results: a file for each kind, a function for each cause."""
