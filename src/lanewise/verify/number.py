"""Whether numbers that runs change matter where a few runs don't get: counters far ahead, levels far off."""

from collections.abc import Callable, Iterable, Mapping

from lanewise.verify.hidden import Number

FAR = 2**10 * 3**2 * 5**4 * 7
"""A multiple of most of the numbers after which something happens now and then, and beyond most limits."""
_NUM_RUNS = 4


def numbers_that_matter(find: Callable[[], Mapping[str, Number]], run: Callable[[], bool]) -> list[str]:
    """Return the names of numbers by which a run gives something else; all get their values back.

    Only those are tried that a run changes from one value to another. So what a run keeps once, as a memo
    does, is none, and what each run sets anew before it looks does not matter.

    Args:
        find: returns the numbers there are.
        run: tells whether a run gave what it gives otherwise.
    """
    before = find()
    run()
    after = find()
    steps = {name: one.value - before[name].value for name, one in after.items() if name in before}
    names = [name for name, step in steps.items() if step]

    def matter(names: Iterable[str], far: int) -> bool:
        try:
            for name in names:
                one, step = after[name], steps[name]
                # So that the third of the runs gets there, whether it looks before it counts or after.
                one.put(type(one.value)(far if step > 0 else -far) - 2 * step)
            return not all(run() for _ in range(_NUM_RUNS))
        except Exception:  # noqa: BLE001 - whatever such a number does that no run has
            return False
        finally:
            for name in names:
                after[name].put(after[name].value)

    for far in (FAR, -FAR) if names else ():
        if matter(names, far):
            return [name for name in names if matter([name], far)] or names
    return []
