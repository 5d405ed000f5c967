"""Torch's record of collectives, read as JSON."""

import json

import pytest
import torch
import torch.distributed as dist

from lanewise.processes.watch.collectives import differing, last_collectives, read_record
from lanewise.testing import run_distributed

# What ProcessGroupNCCL writes, cut to two collectives of one group and one of another.
NCCL = {
    "version": "2.10",
    "comm_lib_version": "2.27.5",
    "entries": [
        {
            "record_id": number,
            "pg_id": group,
            "process_group": [str(group), name],
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "op_id": number,
            "profiling_name": f"nccl:{what}",
            "time_created_ns": 1795449119284172602,
            "input_sizes": [[size]],
            "input_dtypes": ["Float"],
            "output_sizes": [[size]],
            "output_dtypes": ["Float"],
            "state": state,
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": False,
            "timeout_ms": 600000,
            "is_p2p": False,
        }
        for number, group, name, what, size, state in [
            (1, 0, "default_pg", "broadcast", 64, "completed"),
            (1, 1, "fsdp", "all_gather", 8, "completed"),
            (2, 0, "default_pg", "all_reduce", 1024, "started"),
        ]
    ],
}


def test_the_newest_collective_of_each_group_of_a_record_of_nccl_is_found():
    default, fsdp = read_record(json.dumps(NCCL))
    assert default == {
        "group": "0 default_pg",
        "number": 2,
        "name": "nccl:all_reduce",
        "sizes": [[1024]],
        "state": "started",
    }
    assert (fsdp["group"], fsdp["number"], fsdp["name"]) == ("1 fsdp", 1, "nccl:all_gather")


def test_a_record_that_is_no_json_is_refused():
    with pytest.raises(ValueError, match="codec can't decode"):
        read_record(b"\x80\x04\x95 a pickle")


def test_groups_whose_ranks_are_at_different_collectives_are_named():
    of_ranks = {rank: read_record(json.dumps(NCCL)) for rank in range(3)}
    assert differing(of_ranks) == []
    of_ranks[1][0] |= {"number": 1, "name": "nccl:broadcast", "sizes": [[64]]}
    assert differing(of_ranks) == [
        (
            "collectives of group 0 default_pg: ranks 0, 2 came last to number 2, nccl:all_reduce of "
            "[[1024]]; rank 1 came last to number 1, nccl:broadcast of [[64]]"
        )
    ]


def record(world):
    before = last_collectives()
    dist.all_reduce(torch.ones(10))
    return before, last_collectives()


def test_gloo_records_its_collectives():
    for before, after in run_distributed(record, 2, one_machine=False):
        assert after[0]["name"] == "gloo:all_reduce"
        assert after[0]["sizes"] == [[10]]
        assert after[0]["number"] == before[0]["number"] + 1
