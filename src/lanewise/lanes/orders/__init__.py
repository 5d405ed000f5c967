"""The orders in which an epoch visits its samples, a file each.

A new one is a `SampleOrder` in a file here, an export of `lanewise.lanes`, and a name in `config/orders.py`.
"""
