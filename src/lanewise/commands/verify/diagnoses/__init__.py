"""The causes for which devices compute different results: a file for related kinds, a function for a cause.

A decorated function is all that a new cause needs. `Kind` in `commands/verify/evidence.py` has the kinds, in
the order in which their causes are looked for.
"""
