"""The audit is written to its own files only."""

import pytest

from lanewise.errors import StorageError
from lanewise.loggers import AuditLog


def test_an_audit_is_never_written_through_a_link(tmp_path):
    (tmp_path / "plan.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="it is a link"):
        AuditLog(tmp_path, 0, 1, 0, {}, {})
    assert not (tmp_path / "precious").exists()
