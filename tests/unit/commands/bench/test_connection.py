"""Connections between a process that is measured and the one that measures."""

from lanewise.commands.bench.connection import accept, connect, listen, receive, send


def test_an_address_may_be_longer_than_that_of_a_socket(tmp_path):
    """Folders for temporary files on a cluster are."""
    folder = tmp_path / ("a" * 60) / ("b" * 60)
    folder.mkdir(parents=True)
    with listen(folder / "x", 1) as listener, connect(folder / "x") as there, accept(listener) as here:
        send(there, {"a": [1, None]})
        assert receive(here) == {"a": [1, None]}
