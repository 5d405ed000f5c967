"""A Ray cluster of two nodes on this machine: `python ray_cluster.py` starts it, and prints its address."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.integration.command import ROOT, Cold

_OBJECT_STORE_BYTES = 80_000_000


@contextmanager
def running_ray() -> Iterator[str]:
    """Start a cluster with two CPUs on each node, and kill it in the end; yield its address."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with Cold(sys.executable, "-P", __file__, variables={"PYTHONPATH": path}) as cluster:
        assert cluster._process.stdout is not None
        yield cluster._process.stdout.readline().strip()


def main() -> None:
    from ray.cluster_utils import Cluster

    of_node = {"num_cpus": 2, "object_store_memory": _OBJECT_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**of_node, "include_dashboard": False})
    cluster.add_node(**of_node)
    print(cluster.address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
