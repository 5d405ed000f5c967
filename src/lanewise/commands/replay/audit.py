"""Takes steps of a run again that are drawn at random, and says what share of it was seen."""

import math
import random
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lanewise.commands.jobs.start import start
from lanewise.commands.replay.plan import plan_replay, read_written
from lanewise.commands.replay.replay import ReplayJob
from lanewise.commands.replay.report import DIFFERS, EQUAL, Found, compare_step
from lanewise.config.load import Override
from lanewise.errors import CheckpointError
from lanewise.runs.dir import RunDir


def audit(run_dir: Path, count: int, seed: int, overrides: Sequence[Override] = (), **given: Any) -> Found:
    """Draw steps of which the run wrote something, take each again from its checkpoint, and compare.

    Args:
        run_dir: of the run.
        count: how many steps to draw.
        seed: of the draw.
        overrides: as for `plan_replay`.
        given: likewise.

    Raises:
        CheckpointError: if the run wrote nothing that can be compared, or does not promise equal bytes.
    """
    written = read_written(RunDir(run_dir), 0)
    known = sorted({*written.digests, *written.lines})
    drawn = sorted(random.Random(seed).sample(known, min(count, len(known))))
    plans = [plan_replay(run_dir, step, overrides, **given) for step in drawn]
    if not plans or any(plan.config.distributed.equality != "exact" for plan in plans):
        raise CheckpointError(
            f"{run_dir} has no steps that can be audited: it needs distributed.equality exact, and lines of "
            "metrics or digests of steps (integrity.digest_every_steps)."
        )
    found, seen = [], set[int]()
    for num_taken, group in groupby(plans, key=lambda plan: plan.num_taken):
        plan, steps = (of_group := list(group))[-1], [plan.step for plan in of_group]
        seen |= set(range(num_taken + 1, plan.step + 1))
        with ReplayJob.of(plan, observed=steps) as job:
            found += [compare_step(step, plan.written) for step in start(job, is_fresh=True)]
    num_steps, num_seen = max(known), len(seen)
    differing = [one.replayed.step for one in found if one.differing]
    chances = {
        wrong: 1 - math.comb(num_steps - num_seen, wrong) / math.comb(num_steps, wrong)
        for wrong in (1, 10, 100)
        if wrong <= num_steps
    }
    told = ", ".join(f"{chance:.1%} if {wrong}" for wrong, chance in chances.items())
    lines = [line for one in found for line in one.lines()]
    lines += [
        f"drawn with seed {seed}: {len(drawn)} of the {len(known):,} steps of which the run wrote something",
        f"taken again on the way: {num_seen:,} of its {num_steps:,} steps ({num_seen / num_steps:.1%})",
        f"chance to find wrong steps, wherever they are: {told} of the {num_steps:,} are wrong",
    ]
    tree = {
        "seed": seed,
        "drawn": drawn,
        "differing": differing,
        "num_seen": num_seen,
        "num_steps": num_steps,
        "chances": chances,
    }
    return Found(lines, tree, DIFFERS if differing else EQUAL)
