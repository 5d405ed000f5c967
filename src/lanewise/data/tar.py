"""Finds the files in a tar, and makes sure that it is whole."""

import tarfile
from typing import Any


def tar_ranges(stored: Any) -> dict[str, tuple[int, int]]:
    """Return where each file in a tar begins and ends, by its name; of several of a name the last one counts.

    Links and the like are none. A damaged header, or the end of a cut file, is an end of the archive for
    tarfile. So what stands where it stops must be the zeros that end a tar, and nothing else behind them.

    Args:
        stored: the tar, open.

    Raises:
        tarfile.ReadError: if it is cut or damaged, or holds a file with holes.
    """
    ranges: dict[str, tuple[int, int]] = {}
    stored.seek(0)
    with tarfile.open(fileobj=stored, mode="r:") as tar:
        for header in tar:
            if header.issparse() or header.size < 0:
                raise tarfile.ReadError(f"{header.name} is damaged, or written without its zeros (tar -S)")
            if header.isfile():
                ranges[header.name.removeprefix("./")] = header.offset_data, header.offset_data + header.size
        stored.seek(tar.offset)
        zeros = [0 if piece.strip(b"\0") else len(piece) for piece in iter(lambda: stored.read(2**20), b"")]
        if 0 in zeros or sum(zeros) < 2 * tarfile.BLOCKSIZE:
            raise tarfile.ReadError(f"at byte {tar.offset:,} is no file and no end: cut, damaged or several")
    return ranges
