""""""

from lanewise.commands.plan.memory import Memory
from lanewise.commands.plan.result import Row
from tests.unit.commands.plan.synthetic import setting


def row(limit_bytes: float | None) -> Row:
    return Row(
        setting("ddp", 2, 4),
        is_checkpointed=False,
        global_batch_size=32,
        memory=Memory(parameters=80),
        fragmentation_bytes=20,
        sent_bytes=0.0,
        limit_bytes=limit_bytes,
    )


def test_it_fits_with_what_fragmentation_makes_useless():
    assert row(None).fits
    assert row(100).fits
    assert not row(99).fits
