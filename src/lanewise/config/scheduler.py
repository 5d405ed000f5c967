"""The section `scheduler`: how the learning rate changes over a run."""

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Annotated, Any, ClassVar, Literal

from lanewise.config.check import Section, at_least, below, show
from lanewise.config.class_path import ClassConfig

SchedulerName = Literal["linear", "cosine", "wsd"]

Steps = Annotated[int, at_least(0)] | Annotated[float, at_least(0), below(1)]
"""A number of steps, or a part of those of the run."""

WSD_DECAY = 0.2
AUTO = "auto"
"""The value of an argument of a class that stands for the length of the run."""
_LENGTHS = ("T_max", "total_steps", "num_training_steps")
"""What classes call such an argument."""


def length_hint(text: str) -> str:
    """Say that an argument which a text names may be `auto`; nothing where it names none such."""
    return next((f" {name}: auto is the length of the run." for name in _LENGTHS if name in text), "")


def _one_kind_is_given(name: SchedulerName | None, class_path: str | None, warmup: float) -> Iterator[str]:
    if name is not None and class_path is not None:
        yield (
            f"scheduler.name and scheduler.class_path exclude each other: got {name} and {class_path}. "
            "Leave one of them out."
        )
    if name is None and class_path is None and not warmup:
        yield (
            "scheduler.name, scheduler.class_path or scheduler.warmup must be given: got none of them. "
            "Set scheduler.name to linear, cosine or wsd, or leave the section out."
        )


def _arguments_have_a_class(
    class_path: str | None, init_args: Mapping[str, Any], interval: str, warmup: float
) -> Iterator[str]:
    if init_args and class_path is None:
        yield (
            f"scheduler.init_args are those of scheduler.class_path: got {show(init_args)} and no "
            "class_path. Leave them out, or name the class."
        )
    if interval == "epoch" and (class_path is None or warmup):
        yield f"scheduler.interval epoch needs a class, no warmup: got {class_path} and {warmup}. Use step."


def _only_wsd_has_a_decay(name: SchedulerName | None, decay: float | None) -> Iterator[str]:
    if decay is not None and name != "wsd":
        yield (
            f"scheduler.decay is of scheduler.name wsd: got decay {decay} and name {show(name)}. "
            "Leave it out: linear and cosine decay from the warm-up to the end."
        )


def _only_names_fall_so(name: SchedulerName | None, min_lr_factor: float, num_cycles: int) -> Iterator[str]:
    if (min_lr_factor and name is None) or (num_cycles > 1 and name != "cosine"):
        yield (
            f"scheduler.min_lr_factor needs a name, and num_cycles the name cosine: got {min_lr_factor}, "
            f"{num_cycles} and name {show(name)}. Leave out what does not apply."
        )


class SchedulerConfig(Section):
    """How the learning rate changes: as a name says, which knows the run's length, or as a class does."""

    TEXT_KEY: ClassVar = "name"

    RULES = (_one_kind_is_given, _arguments_have_a_class, _only_wsd_has_a_decay, _only_names_fall_so)

    name: SchedulerName | None = None
    """linear and cosine decay from the warm-up to 0 at the end of the run; wsd stays, and decays linearly
    over its last part. It may stand alone: `scheduler: cosine`. Unset: class_path, or a constant learning
    rate after the warm-up."""
    warmup: Steps = 0
    """Over how many of the first steps the learning rate rises linearly: a whole number, or as a number below
    1 the part of the run that they are."""
    decay: Steps | None = None
    """Of wsd: over how many of the last steps the learning rate falls to 0, likewise; unset: 0.2."""
    min_lr_factor: Annotated[float, at_least(0), below(1)] = 0.0
    """Of a scheduler with a name: what part of the learning rate it falls to, such as 0.1, in place of 0."""
    num_cycles: Annotated[int, at_least(1)] = 1
    """Of cosine: how many times it falls, each time as long, and from the whole learning rate."""
    class_path: str | None = None
    """In place of a name: a scheduler as `module.Class`, which begins after the warm-up, or a function that
    makes one, such as transformers.get_cosine_schedule_with_warmup."""
    init_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class by name, without its optimizer, which is given at run time. auto, such as
    T_max: auto, is the number of steps of the run after the warm-up; with interval epoch, of its epochs."""
    interval: Literal["step", "epoch"] = "step"
    """Of a class: whether it is stepped after each optimizer step, or after each epoch."""

    @property
    def of_class(self) -> ClassConfig | None:
        """The class and its arguments; None where there is none."""
        if self.class_path is None:
            return None
        return ClassConfig(class_path=self.class_path, init_args=self.init_args)

    @property
    def knows_length(self) -> bool:
        """Whether the learning rate of a step depends on the length of the run."""
        return self.name is not None or AUTO in self.init_args.values()

    def of_length(self, num_steps: int) -> ClassConfig | None:
        """Return `of_class` for a run of so many steps of it: what `auto` stands for; warm-up excluded."""
        section = self.of_class
        if section is None:
            return None
        after_warmup = num_steps - self.warmup_steps(num_steps)
        args = {name: after_warmup if value == AUTO else value for name, value in section.init_args.items()}
        return replace(section, init_args=args)

    def warmup_steps(self, num_steps: int) -> int:
        """Return how many of the steps of a run are the warm-up."""
        return _count(self.warmup, num_steps)

    def decay_steps(self, num_steps: int) -> int:
        """Return over how many of the steps of a run, at its end, the learning rate of `wsd` falls."""
        return _count(WSD_DECAY if self.decay is None else self.decay, num_steps)


def _count(steps: float, num_steps: int) -> int:
    return steps if isinstance(steps, int) else round(steps * num_steps)
