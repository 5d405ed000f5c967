"""The loop: from a configuration to a trained model.

`engine.py` is the loop itself. What it is made of stands in rooms: `step` takes a training step, `buffers`
merges what lanes make of the model's buffers, `samples` says who reads what, `evaluation` evaluates,
`state` is what a checkpoint holds, `run` builds a run from its configuration, and `own_loop` gives lanes to
the user's own loop.
"""
