"""Kills a run at random moments, goes on with it on other numbers of devices, and compares what it leaves.

    make soak

Each line says what was killed, when, and how far the run had come; the last one, whether the model, the
losses and the samples are those of a run that nobody killed. The only argument is the seed of the moments.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from lanewise.lanes import Schedule, lane_seed
from tests.integration.command import LANEWISE, Cold, Command, lanewise, wait_for, write_config

SCHEDULE = Schedule(num_samples=30, global_batch_size=16, micro_batch_size=2)
"""Of `tasks.Noisy`: two steps an epoch, the second with seven lanes."""
KINDS = ("launcher", "worker", "all")
NUM_KILLS = 20


def write_noisy(folder: Path, *, num_steps: int = 12, every_steps: int = 3, **sections: Any) -> Path:
    """Write the configuration of a run whose result depends on every part of its state."""
    folder.mkdir(exist_ok=True)
    given = {
        "task": "tasks.Noisy",
        "batch": {"global_batch_size": 16, "micro_batch_size": 2},
        "train": {"max_steps": num_steps, "run_dir": str(folder / "run")},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
        "scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 5}},
        "checkpoint": {"every": {"steps": every_steps}},
    }
    return write_config(folder, **given | sections)


def losses(run_dir: Path) -> list[tuple[int, int, Any]]:
    """Return epoch, step and loss of each line of metrics; of a line of digests these."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["epoch"], line["step"], line.get("digests") or line["train/loss"]) for line in lines]


def result(folder: Path) -> tuple[bytes, list[tuple[int, int, Any]]]:
    """Return what must not depend on how often the run in a folder was stopped."""
    return (folder / "run" / "model.safetensors").read_bytes(), losses(folder / "run")


def kill_and_resume(
    config: Path,
    random: Random,
    kinds: list[str],
    say: Callable[[str], None],
    num_steps: int,
    start: Callable[..., Command],
) -> None:
    """Start a run, kill it once for each kind, and let the last attempt end; check what it was trained on."""
    folder = config.parent / "trained"
    folder.mkdir()
    options = [
        "--resume",
        "--audit",
        "--task.init_args.folder",
        folder,
        "--task.init_args.sleep_seconds",
        0.01,
    ]
    for attempt, kind in enumerate([*kinds, None]):
        devices = random.choice([1, 2, 3, 4, 8])
        arguments = ["train", config, *options, "--distributed.devices", devices]
        variables = {"ATTEMPT": str(attempt)}
        if kind is None:
            lanewise(*arguments, variables=variables).require_success()
            break
        with start(*arguments, variables=variables) as command:
            pids = [command.pid]
            if kind == "worker" and devices > 1:
                pids = [command.worker(random.randrange(devices))]
            # By what was trained, so that a slow machine is not killed before it begins; 0 is in its start.
            num_lanes = random.randrange(SCHEDULE.num_lanes * num_steps // (len(kinds) + 1))
            wait_for(partial(has_trained, command, folder, attempt, num_lanes))
            seconds = random.uniform(0, 0.05 if num_lanes else 3)
            time.sleep(seconds)
            for pid in [*command.pids()] if kind == "all" else pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            done = command.finish()
        assert done.leftover == [], done.leftover
        assert done.code in (-9, 1, 0), f"exit code {done.code}\n{done.stderr}"
        say(
            f"attempt {attempt} on {devices}: killed {kind} {seconds:.3f} s after {num_lanes} lanes: "
            f"{sorted(path.name for path in config.parent.glob('run/checkpoints/*'))}"
        )
    check_lineage(folder, num_steps)
    lanewise("audit", config.parent / "run").require_success()


def has_trained(command: Command, folder: Path, attempt: int, num_lanes: int) -> bool:
    """Tell whether an attempt has gone through so many lanes, over all processes, or has ended."""
    lines = sum(path.read_text().count("\n") for path in folder.glob(f"{attempt}-*"))
    return lines >= num_lanes or command.poll() is not None


def check_lineage(folder: Path, num_steps: int) -> None:
    """Check that the steps which made the model saw every sample of every epoch once.

    Of several attempts at a step, the last one counts: the attempt that began last at this step or before.
    """
    turns = [(step, lane) for step in range(num_steps) for lane in range(SCHEDULE.num_lanes)]
    places = {lane_seed(0, *turn): turn for turn in turns}
    trained: dict[int, dict[tuple[int, int], list[list[int]]]] = defaultdict(lambda: defaultdict(list))
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            seed, *samples = map(int, line.split())
            trained[int(path.name.partition("-")[0])][places[seed % 2**64]].append(samples)
    first_steps = {attempt: min(step for step, _ in lanes) for attempt, lanes in trained.items()}
    seen: dict[int, list[int]] = defaultdict(list)
    for step in range(num_steps):
        attempt = max(attempt for attempt, first in first_steps.items() if first <= step)
        for lane in range(SCHEDULE.num_present_lanes(step)):
            times = trained[attempt][step, lane]
            if step < first_steps[attempt] + 2:  # in the first steps of a start some lanes run again
                times = [samples for number, samples in enumerate(times) if samples not in times[:number]]
            assert len(times) == 1, f"attempt {attempt} trained step {step}, lane {lane} on {times}"
            seen[step // SCHEDULE.steps_per_epoch] += times[0]
    for epoch, samples in seen.items():
        assert sorted(samples) == list(range(SCHEDULE.num_samples)), f"epoch {epoch}: {sorted(samples)}"


def main() -> None:
    """Kill one run again and again; exits with an error if it does not end like the other one."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else SystemRandom().randrange(1000)
    print(f"seed {seed}")
    random = Random(seed)
    kinds = [random.choice(KINDS) for _ in range(NUM_KILLS)]
    num_steps = 200
    with tempfile.TemporaryDirectory(prefix="lanewise-soak-") as name:
        sections = {"log": {"every_steps": 7}, "integrity": {"digest_every_steps": 1}}
        whole, parts = (
            write_noisy(Path(name, folder), num_steps=num_steps, every_steps=1, **sections)
            for folder in ("whole", "parts")
        )
        lanewise("train", whole).require_success()
        kill_and_resume(
            parts, random, kinds, lambda line: print(line, flush=True), num_steps, partial(Cold, *LANEWISE)
        )
        is_same = result(whole.parent) == result(parts.parent)
    if not is_same:
        sys.exit("the killed run ended with another model or other losses")
    print(f"{NUM_KILLS} kills: the same model, the same losses, every sample of every epoch once")


if __name__ == "__main__":
    main()
