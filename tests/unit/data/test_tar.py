"""Where the files in a tar are, and that a cut or damaged one has none."""

import io
import random
import tarfile
from itertools import pairwise

import pytest

from lanewise.data.tar import tar_ranges

TEXTS = {"a.txt": b"one\n", "./b.txt": b"two\n" * 9, "empty.txt": b"", "d/c.txt": b"three\n"}


def tar_of(files, tar_format=tarfile.GNU_FORMAT):
    """A tar with a folder and links besides; with no more zeros at its end than it needs."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tar_format) as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("link", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "a.txt"
            tar.addfile(member)
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        end = tar.offset
    return written.getvalue()[: end + 1024]


def texts_in(tar):
    return {name: tar[begin:end] for name, (begin, end) in tar_ranges(io.BytesIO(tar)).items()}


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_files_are_found_by_their_names(tar_format):
    long = {f"{'d' * 90}/{'n' * 90}.txt": b"long\n"}
    expected = {name.removeprefix("./"): data for name, data in (TEXTS | long).items()}
    assert texts_in(tar_of(TEXTS | long, tar_format)) == expected
    assert texts_in(tar_of({}) + bytes(9000)) == {}


def test_a_tar_that_is_cut_anywhere_is_refused():
    """It was read up to the cut without a word, where the cut was between two files or in a header."""
    tar = tar_of(TEXTS)
    for size in range(len(tar)):
        with pytest.raises(tarfile.ReadError):
            tar_ranges(io.BytesIO(tar[:size]))


def test_a_bit_is_refused_unless_it_is_in_the_content_of_a_file():
    """A bit in a header was taken for the end: a third of the lines were left."""
    tar = tar_of(TEXTS)
    whole, draw = texts_in(tar), random.Random(0)
    num_refused = 0
    for place in draw.sample(range(8 * len(tar)), 200):
        damaged = bytearray(tar)
        damaged[place // 8] ^= 1 << place % 8
        try:
            found = texts_in(bytes(damaged))
        except tarfile.ReadError:
            num_refused += 1
            continue
        assert {name: len(data) for name, data in found.items()} == {
            name: len(data) for name, data in whole.items()
        }
    assert num_refused > 100


def test_two_tars_in_one_file_are_not_read_as_the_first_of_them():
    with pytest.raises(
        tarfile.ReadError, match="at byte 5,120 is no file and no end: cut, damaged or several"
    ):
        tar_ranges(io.BytesIO(2 * tar_of(TEXTS)))


def test_a_size_below_zero_and_a_file_with_holes_are_refused():
    """The first was an assertion; of the second 215 bytes filled the disk with its zeros."""
    header = bytearray(tar_of({"a.txt": b"x"})[1536:2048])
    header[124:136] = b"\xff" * 12
    header[148:156] = b"%06o\0 " % sum([*header[:148], *b" " * 8, *header[156:]])
    holes = io.BytesIO()
    with tarfile.open(fileobj=holes, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("GNUSparseFile.0/a.txt")
        keys = {"major": "1", "minor": "0", "name": "a.txt", "realsize": str(2**40)}
        member.pax_headers = {f"GNU.sparse.{key}": value for key, value in keys.items()}
        member.size = 512
        tar.addfile(member, io.BytesIO(b"1\n0\n0\n".ljust(512, b"\0")))
    for tar in (bytes(header) + bytes(2048), holes.getvalue()):
        with pytest.raises(tarfile.ReadError, match=r"a\.txt is damaged, or written without its zeros"):
            tar_ranges(io.BytesIO(tar))


def test_ranges_do_not_overlap():
    ranges = sorted(tar_ranges(io.BytesIO(tar_of(TEXTS))).values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
