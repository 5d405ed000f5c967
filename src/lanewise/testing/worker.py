"""`python -m lanewise.testing.worker FOLDER RANK`: one of `run_distributed`."""

import os
import pickle
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from lanewise.processes.world.shared_memory import share_memory
from lanewise.processes.world.world import GroupWorld, LocalWorld, World


def work(folder: Path, rank: int) -> None:
    """Join the world, call the function, and write what it returned or why it failed."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # which no other machine can reach
    try:
        written = pickle.loads((folder / "call").read_bytes())  # noqa: S301 - from our own parent
        sys.path[:], call, world_size, device_name, one_machine = written
        device = torch.device(device_name)
        function, args = pickle.loads(call)  # noqa: S301 - likewise
        world: World = LocalWorld(device)
        if world_size > 1:
            store = dist.FileStore(f"{folder}/store", world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            memory = share_memory(folder) if one_machine and device.type == "cpu" else None
            world = GroupWorld(device, store, memory)
            dist.barrier()  # else a rank that ends at once hangs up on one that is still connecting
        is_error, result = False, pickle.dumps((time.monotonic(), False, function(world, *args)))
        world.close()
    except Exception:  # noqa: BLE001 - shown by the caller
        is_error, result = True, pickle.dumps((time.monotonic(), True, traceback.format_exc()))
    (folder / f"{rank}.tmp").write_bytes(result)
    (folder / f"{rank}.tmp").rename(folder / f"result-{rank}")
    os._exit(is_error)  # what ranks do at their end is not what is tested


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
