"""Prepares the environment before any test imports torch, as the command line does."""

import os
from multiprocessing import forkserver

from lanewise.config import pin_environment

pin_environment(threads=1, equality="exact")
# Warnings are errors in the processes that tests start as well; pytest's own setting ends at this process.
os.environ["PYTHONWARNINGS"] = "error::FutureWarning,error::UserWarning"

# run_distributed forks from this server: what it has imported, no rank has to import again.
forkserver.set_forkserver_preload(
    ["lanewise.testing", "lanewise.engine", "torchmetrics.classification", "torchmetrics.retrieval"]
)
forkserver.ensure_running()
