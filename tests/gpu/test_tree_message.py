"""Messages to other processes through what connects accelerators, which sends their tensors only."""

import torch
import torch.distributed as dist

from lanewise.processes.world.world import GroupWorld


def exchange(world):
    store = dist.HashStore()
    backend = dist.get_default_backend_for_device(world.device)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    joined = GroupWorld(world.device, store, None)
    value = {"text": "a", "scores": torch.arange(5.0, device=world.device), "count": (1, None)}
    (first,), (second,) = joined.all_gather_tree(value), joined.gather_tree(value)
    received = [first, second, joined.broadcast_tree(value)]
    joined.close()
    return [(one["text"], one["scores"], one["count"]) for one in received]


def test_a_message_is_sent_from_the_device_and_arrives_in_host_memory(device):
    ((first, *others),) = device.run_apart(exchange, 1)
    text, scores, count = first
    assert (text, scores.tolist(), count) == ("a", [0.0, 1.0, 2.0, 3.0, 4.0], (1, None))
    assert scores.device.type == "cpu"
    assert [other[1].tolist() for other in others] == [scores.tolist()] * 2
