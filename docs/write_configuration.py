"""Prints docs/configuration.md from the configuration's dataclasses: `python docs/write_configuration.py`."""

import inspect
from collections.abc import Iterator

from lanewise.config import RunConfig
from lanewise.config.check import Section
from lanewise.config.describe import describe_section

HEAD = """\
# Configuration

Every key of a configuration, as a file (YAML, JSON, TOML or Jsonnet), as `--section.key value`, or as a
section that `lanewise.train` takes. `lanewise train --help` lists the same keys, and `lanewise train CONFIG
--help` also the arguments of the classes that CONFIG names.
"""

TAIL = """\
## How the learning rate changes

    scheduler: cosine
    scheduler: {name: cosine, warmup: 0.05}
    scheduler: {name: cosine, warmup: 0.05, min_lr_factor: 0.1}
    scheduler: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 100}, warmup: 20}

![What the schedulers with a name make of the learning rate over a run](_static/schedules.svg)

A scheduler with a name knows how many steps the run takes; that number is printed before the first step.
With `w` steps of warm-up step `s`, from 1, has `s / (w + 1)` of the learning rate while `s <= w`. From there
linear and cosine fall to 0, which only the step after the last one would have. With `min_lr_factor: 0.1` they
and wsd fall to a tenth of the learning rate, in each parameter group to a tenth of its own. With
`num_cycles: 3` cosine falls three times over equal parts of the run, each time from the whole learning rate.
For cycles that grow there are classes, such as `torch.optim.lr_scheduler.CosineAnnealingWarmRestarts`.

So the length is part of what the run is: a checkpoint of a run with another number of steps is refused,
unless `--resume --allow num_steps` says to go on; the learning rate is then that which the new length gives
each further step. A class, or a warm-up alone, does not depend on the length, if the warm-up is a number of
steps.

A class of torch's or your own is stepped once in each optimizer step, on any number of processes, or with
`interval: epoch` after each epoch: so do those that count in epochs, as they are written for torch's loops.

    scheduler:
      class_path: torch.optim.lr_scheduler.CosineAnnealingLR
      init_args: {T_max: auto}   # the number of epochs
      interval: epoch

A stream has no such interval, as nobody knows where its epochs end.

`torch.optim.lr_scheduler.ReduceLROnPlateau` is stepped after each evaluation instead, with the value of
`evaluate.best`, which must be set, without eval datasets to `train/loss_epoch`; its `mode` is
`evaluate.best_mode`. With a `warmup` it begins with the
first evaluation after the warm-up.

## Limits

A configuration is a regular file of at most 1,048,576 characters, with at most 100,000 values in it, nested
at most 64 levels deep, and integers of at most 100 digits. Text is Unicode. YAML is read as version 1.2 reads
it, without tags such as `!!set`. TOML's dates are put into quotes. A Jsonnet program has 10 seconds and 1 GiB
of memory.
"""


def main() -> str:
    """Return the page: the whole configuration first, then each section under the names of its keys."""
    sections: dict[type[Section], list[str]] = {RunConfig: ["Sections"]}
    for key, cls in sections_in(RunConfig):
        sections.setdefault(cls, []).append(key)
    return "\n".join([HEAD, *(write_section(", ".join(keys), cls) for cls, keys in sections.items()), TAIL])


def sections_in(cls: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections inside of one with their dotted keys, and those inside of these after each."""
    for key in describe_section(cls):
        if key.section is not None:
            yield f"{prefix}{key.name}", key.section
            yield from sections_in(key.section, f"{prefix}{key.name}.")


def write_section(title: str, cls: type[Section]) -> str:
    """Write the table of one section."""
    lines = [f"## {title}", "", inspect.cleandoc(cls.__doc__ or ""), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{key.name}` | {key.kind} | {key.default} | {key.meaning} |" for key in describe_section(cls)
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(main(), end="")
