"""`lanewise replay RUN --step S`."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lanewise.cli.arguments import Argument, Arguments, Command, read_count, read_path
from lanewise.cli.evaluate import TRUST
from lanewise.cli.result import JSON, STDOUT, write_json
from lanewise.errors import ConfigError, plain_lines
from lanewise.processes.world.environment import require_no_world

if TYPE_CHECKING:
    from lanewise.commands.replay.plan import ReplayPlan


def _read_number(text: str) -> int:
    """Read a number from 0 on."""
    if not text.isdecimal():
        raise ValueError("be a number from 0 on")
    return int(text)


def _read_exact(text: str) -> tuple[str, ...]:
    """Read what may differ."""
    if text != "exact":
        raise ValueError("be exact")
    return (text,)


_RUN = Argument("RUN", "the run_dir of a run, which may go on meanwhile", read=read_path)
_STEP = Argument[int | None]("--step", "the step to take again, from 1", "N", read_count, None)
_LANE = Argument[int | None]("--lane", "runs this lane of the step, from 0", "N", _read_number, None)
_RANDOM = Argument[int | None](
    "--random", "audits the run: takes so many steps again that are drawn at random", "N", read_count, None
)
_SEED = Argument("--seed", "of the draw; 0 if left out", "N", _read_number, 0)
_ALLOW = Argument[tuple[str, ...]](
    "--allow", "torch, processor or GPU may differ from the run's, and rounding", "exact", _read_exact, ()
)


def replay(arguments: Arguments) -> int:
    """Take a step, a lane or some steps again; the exit codes are those of diff."""
    require_no_world("replay starts its own processes")
    step, lane, count = (arguments[name] for name in (_STEP, _LANE, _RANDOM))
    if (step is None) == (count is None) or (lane is not None and step is None):
        raise ConfigError("replay takes --step N, with --lane N or without, or --random N. Give one of them.")
    from lanewise.commands.replay.plan import plan_replay
    from lanewise.commands.replay.report import audit, replay_steps

    run_dir, overrides, json_file = arguments[_RUN], arguments.overrides, arguments[JSON]
    given: Any = {"trust": arguments[TRUST], "allow": arguments[_ALLOW]}
    if step is None:
        audited = audit(run_dir, count or 0, arguments[_SEED], overrides, **given)
        _show([str(audited)], asdict(audited), json_file)
        return audited.code
    plan = plan_replay(run_dir, step, overrides, **given)
    if json_file != STDOUT:
        print(plan.describe(), flush=True)
    if lane is not None:
        return _replay_lane(plan, lane, arguments)
    (found,) = replay_steps(plan, [step])
    _show([str(found)], asdict(found), json_file)
    return found.code


def _replay_lane(plan: "ReplayPlan", lane: int, arguments: Arguments) -> int:
    """Run a lane of the last step of a plan again, and show it."""
    from lanewise.commands.jobs.start import start
    from lanewise.commands.replay.lane import LaneJob
    from lanewise.commands.replay.report import compare_lane, lane_lines

    with LaneJob.of(plan, lane=lane) as job:
        found = start(job, is_fresh=True)
    compared = compare_lane(found, plan, lane)
    told = {"step": plan.step, "lane": lane, **found, "comparison": asdict(compared.comparison)}
    _show([*lane_lines(found), str(compared)], told, arguments[JSON])
    return compared.code


def _show(lines: Iterable[str], tree: Mapping[str, Any], json_file: Path | None) -> None:
    """Print what was found, and write it to a file if there is one."""
    if json_file is not None:
        write_json(json_file, tree)
    if json_file != STDOUT:
        print(*map(plain_lines, lines), sep="\n")


COMMAND = Command(
    name="replay",
    text="""\
Takes a step of a run again, from the newest good checkpoint before it or from the seed, and compares it with
all that the run wrote of it: digests, line of metrics, evaluation, audit. In `exact` the bytes are the same
on any number of processes. Nothing is written to the run:

  lanewise replay runs/mnist --step 412
  lanewise replay runs/mnist --step 412 --lane 3
  lanewise replay runs/mnist --random 20

With --lane, only that lane of the step: its samples, its loss, its gradient, and the loss of each sample
alone. With --random, an audit: the steps are drawn, and what share of the run was seen is said.

Exit codes are those of diff: 0 equal, 1 something differs, 2 it could not be taken again, or the run wrote
nothing of it that can be compared.""",
    run=replay,
    operands=(_RUN,),
    options=(_STEP, _LANE, _RANDOM, _SEED, _ALLOW, JSON, TRUST),
    has_overrides=True,
)
