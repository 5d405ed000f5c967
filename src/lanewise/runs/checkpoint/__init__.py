"""Durable state of a run; to list the checkpoints of a run needs no torch.

A checkpoint is a folder. `manifest.py` has the version of the format and manifest.json, `part.py` the tensors
of each process; `saver.py` writes state.json by `processes/world/encode.py`, and `engine/state/run_state.py`
says what it holds.
"""
