"""Loses, drains and cuts off hosts of runs at random moments, lets them come back, and compares what is left.

    make soak

Three hosts are network namespaces with an sshd each, so it needs root. Each line says what happened to which
host, and how far the run had come. The arguments are the number of disturbances and the seed of the moments.
"""

import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random, SystemRandom

from tests.integration.command import Command, lanewise, wait_for
from tests.integration.elastic import DISTURBANCES, begin, num_steps, said, starts
from tests.integration.ssh import NAMES, WHY_NOT, Cluster, running_ssh
from tests.soak.kill_and_resume import result, write_noisy

NUM_STEPS = 120


def disturb_until_the_end(cluster: Cluster, config: Path, run: Command, random: Random, most: int) -> int:
    """Disturb a run so often, or until it ends; return how often it was."""
    num_disturbed = num_starts = 0
    while num_disturbed < most:

        def trains(num_starts: int = num_starts) -> bool:
            lines = starts(config)
            return run.poll() is not None or (
                len(lines) > num_starts and num_steps(config) >= lines[-1]["first_step"]
            )

        wait_for(trains, every_seconds=0.1)
        for host in cluster.hosts:
            host.join()
        time.sleep(random.uniform(0, 3))
        if run.poll() is not None:
            break
        used = list(starts(config)[-1]["hosts"])
        kind = random.choice(["lose", "cut", *["drain"] * (len(used) > 2)])  # else too few are left
        name = random.choice(used)
        num_starts = len(starts(config))
        with suppress(ProcessLookupError):  # it is about to end
            DISTURBANCES[kind](cluster, NAMES.index(name))
        num_disturbed += 1
        print(f"{kind} {name} of {', '.join(used)} after step {num_steps(config)}", flush=True)
    done = run.finish()
    assert done.code == 0, said(config)
    wait_for(lambda: not cluster.pids())
    return num_disturbed


def main() -> None:
    """Disturb runs until it was often enough; exits with an error if one does not end like that in peace."""
    if WHY_NOT is not None:
        print(f"no hosts are lost: {WHY_NOT}")
        return
    left = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else SystemRandom().randrange(1000)
    print(f"seed {seed}")
    random = Random(seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lanewise-soak-")))
        (folder / "ssh").mkdir()
        cluster = stack.enter_context(running_ssh(folder / "ssh", 3))
        whole = write_noisy(folder / "whole", num_steps=NUM_STEPS)
        lanewise("train", whole).require_success()
        number = 0
        while left > 0:
            number += 1
            config = write_noisy(folder / f"{number}", num_steps=NUM_STEPS)
            slowly = ("--task.init_args.sleep_seconds", 0.05, "--distributed.max_restarts", 100)
            with begin(cluster, config, "--audit", *slowly) as run:
                left -= disturb_until_the_end(cluster, config, run, random, left)
            lanewise("audit", config.parent / "run").require_success()
            if result(config.parent) != result(whole.parent):
                sys.exit(f"run {number} ended with another model or other losses")
            print(f"run {number}: {len(starts(config))} starts, the same model, the same losses", flush=True)


if __name__ == "__main__":
    main()
