"""Orders the pairs of hosts so that many are measured at once, and none disturbs another."""

from collections.abc import Iterator, Sequence


def rounds_of_pairs(count: int) -> Iterator[Sequence[tuple[int, int]]]:
    """Yield the rounds of a round-robin tournament: every pair comes once, and nobody twice in a round.

    There are count - 1 rounds for an even number, and count for an odd one, of which each leaves one out.
    """
    places = list(range(count + count % 2))
    for _ in places[1:]:
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]
        places[1:] = [places[-1], *places[1:-1]]  # the first one stays, the others go round
