"""The loop: from a configuration to a trained model.

`engine.py` is the loop itself. Its parts are in subpackages: `step` takes a training step, `buffers` merges
the buffers that the lanes changed, `samples` decides which process reads which samples, `evaluation`
evaluates, `state` defines what a checkpoint holds, `run` builds a run from its configuration, and `own_loop`
gives lanes to the user's own loop.
"""
