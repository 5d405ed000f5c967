"""The sections of a configuration that were read off another library's objects, and those that were given."""

from collections.abc import Mapping
from typing import Any


def merged(read: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections that were read, with the keys of those that were given in their place.

    A given length of the run, class or text takes the place of the whole that was read.
    """
    sections = dict(read)
    for name, section in overrides.items():
        own = read.get(name)
        if not isinstance(section, Mapping) or not isinstance(own, Mapping) or "class_path" in own:
            sections[name] = section
            continue
        ends = {"epochs", "max_steps"}
        taken = own.keys() - ends if ends & section.keys() else own.keys()
        sections[name] = {**{key: own[key] for key in own if key in taken}, **section}
    return sections


def steps_of(sections: Mapping[str, Any], num_samples: int) -> tuple[int, float]:
    """Return how many steps an epoch and the whole run have; of a part of an epoch a part.

    Args:
        sections: among them batch, train and data.
        num_samples: of the training dataset.
    """
    size = sections["batch"]["global_batch_size"]
    per_epoch = max(1, num_samples // size if sections["data"].get("drop_last") else -(-num_samples // size))
    epochs, max_steps = (sections["train"].get(name) for name in ("epochs", "max_steps"))
    return per_epoch, min(end for end in (epochs and epochs * per_epoch, max_steps) if end)
