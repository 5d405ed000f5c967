"""The pods of a printed JobSet, as processes of this machine: what they leave, and their exit codes."""

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from lanewise.config.load import Override, dump_config, load_config
from lanewise.launch.kubernetes import CONFIG_FILE, manifest
from tests.integration.command import Cold, Done, train, wait_for, write_config
from tests.listening import reserve_port
from tests.soak.kill_and_resume import losses, result, write_noisy

SLOWLY = ("--task.init_args.sleep_seconds", "0.1")


def pods(file: Path, *arguments: str, num_processes: int = 1) -> list[Cold]:
    """Start the two pods of the JobSet that is printed for a configuration."""
    keys = {"launcher": "kubernetes", "nodes": 2, "devices": num_processes}
    keys |= {"kubernetes.image": "image", "kubernetes.kind": "JobSet"}
    config = load_config(
        str(file), [Override(f"distributed.{key}", str(value)) for key, value in keys.items()]
    )
    program = ("train", CONFIG_FILE, "--resume", *arguments)
    files, job_set = yaml.safe_load_all(manifest(config, program, dump_config(config)))
    mounted = file.with_name("mounted.yaml")
    mounted.write_text(files["data"]["config.yaml"])
    (job,) = job_set["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    _, *command = [str(mounted) if word == CONFIG_FILE else word for word in container["command"]]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    port = reserve_port()
    here = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    return [
        Cold(sys.executable, *command, variables={**variables, **here, "PET_NODE_RANK": str(number)})
        for number in range(2)
    ]


def finish(both: list[Cold]) -> list[Done]:
    with ExitStack() as stack:
        done = [stack.enter_context(pod).finish() for pod in both]
    assert [ended.leftover for ended in done] == [[], []]
    return done


def stop_first(both: list[Cold], metrics: Path) -> None:
    """Do what the cluster does to a pod that it needs elsewhere, in the middle of the run."""
    wait_for(metrics.exists)
    os.kill(both[0].pid, signal.SIGTERM)


@pytest.mark.slow
def test_a_pod_that_is_preempted_lets_all_save_and_start_again(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(write_noisy(whole)).require_success()
    both = pods(write_noisy(parts, checkpoint={}), *SLOWLY, num_processes=2)
    stop_first(both, parts / "run" / "metrics.jsonl")
    assert [done.code for done in finish(both)] == [75, 75]
    num_steps = len(losses(parts / "run"))
    assert 1 <= num_steps < 12
    assert [path.name for path in parts.glob("run/checkpoints/*")] == [f"step-{num_steps:06d}"]
    assert [done.code for done in finish(pods(parts / "config.yaml", num_processes=2))] == [0, 0]
    assert result(parts) == result(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "init_args", "code"),
    [
        ("tasks.Detached", {}, 2),
        ("tasks.Ends", {"how": "sys", "rank": 1}, 2),
        ("tasks.RaisesInForward", {"rank": 0}, 1),
    ],
)
def test_every_pod_exits_with_the_code_of_the_first_error(tmp_path, task, init_args, code):
    done = finish(pods(write_config(tmp_path, task, init_args)))
    assert [ended.code for ended in done] == [code, code], [ended.stderr for ended in done]


@pytest.mark.slow
def test_a_mistake_in_the_configuration_ends_a_pod_with_2(tmp_path):
    assert [done.code for done in finish(pods(write_config(tmp_path), "--no-such-option"))] == [2, 2]
