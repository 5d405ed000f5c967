"""Archives in the place of the files that they hold."""

import gzip
import io
import random
import tarfile
import time
import zipfile

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lanewise.data import JsonLinesDataset, ParquetDataset, TextDataset, TokenDataset, record_index
from lanewise.data.archive import list_contents
from lanewise.errors import DataError
from tests.slow import slow

SHARDS = {
    "b/2.jsonl": b"4\n5\n",
    "a/1.jsonl": b"1\n2\n3\n",
    "c.jsonl.gz": gzip.compress(b"6\n7\n"),
    "._c.jsonl": b"not a shard\n",
    "__MACOSX/._1.jsonl": b"not a shard\n",
    ".hidden/d.jsonl": b"not a shard\n",
    "README.md": b"# Shards\n",
}
NAMES = ("all.tar", "all.zip", "all.tar.gz", "all.tgz", "all.tar.bz2", "all.txz", "ALL.TAR.XZ")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The cache folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lanewise"


def pack(path, files):
    """Write an archive of the kind that its name says, with a folder and a link besides."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as zipped:
            zipped.mkdir("a")
            for name, data in files.items():
                zipped.writestr(name, data)
        return path
    ending = path.name.lower().rpartition(".")[2]
    mode = {"tar": "w", "tgz": "w:gz", "txz": "w:xz"}.get(ending, f"w:{ending}")
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("link.jsonl")
        link.type, link.linkname = tarfile.SYMTYPE, "a/1.jsonl"
        tar.addfile(link)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_the_shards_of_an_archive_are_read_once_and_sorted(tmp_path, name):
    dataset = JsonLinesDataset(pack(tmp_path / name, SHARDS))
    assert dataset.__getitems__(list(range(len(dataset)))) == [1, 2, 3, 4, 5, 6, 7]
    assert dataset.block_sizes() == [3, 2, 2]
    again = JsonLinesDataset(tmp_path / name)
    assert again.__getitems__([6, 0, 4]) == [7, 1, 5]
    assert again.fingerprint() == dataset.fingerprint()


def test_an_archive_is_unpacked_once_and_said_in_one_line(tmp_path, cache, caplog):
    caplog.set_level("INFO")
    archive = pack(tmp_path / "all.zip", SHARDS)
    for _ in range(2):
        list_contents(archive, (".jsonl",))
    (said,) = [record.getMessage() for record in caplog.records]
    (folder,) = cache.iterdir()
    assert said.startswith(f"unpacked {archive}, 0.0 MiB, into {folder} in ")
    pack(archive, SHARDS | {"d.jsonl": b"8\n"})
    assert len(JsonLinesDataset(archive)) == 8  # another version is unpacked beside it


def test_a_tar_is_read_as_it_is(tmp_path, cache):
    JsonLinesDataset(pack(tmp_path / "all.tar", SHARDS))
    assert not list(cache.glob("*.unpacked"))


def test_many_small_members_share_an_index(tmp_path, cache):
    """Each had a file, a lock and threads of its own, which took 50 times as long as to find the member."""
    archive = pack(tmp_path / "all.tar", {f"{number:04}.jsonl": b"%d\n" % number for number in range(1000)})
    begin = time.process_time()
    with tarfile.open(archive) as tar:
        tar.getmembers()
    walked = time.process_time()
    dataset = JsonLinesDataset(archive)
    assert time.process_time() - walked < 15 * (walked - begin)  # usually 4
    assert [file.suffix for file in cache.iterdir()] == [".records"]
    assert list(dataset) == list(JsonLinesDataset(archive)) == list(range(1000))


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_member_leaves_the_index_of_the_others(tmp_path, cache, damaged, monkeypatch):
    monkeypatch.setattr(record_index, "_SMALL_BYTES", 99)
    files = {f"{number}.jsonl.gz": gzip.compress(b"%d\n" % number) for number in range(3)}
    files[f"{damaged}.jsonl.gz"] = files[f"{damaged}.jsonl.gz"][:-1]
    archive = pack(tmp_path / "all.tar", files | {"3.jsonl": b"3\n" * 99, "4.jsonl": b"4\n"})
    whole = [number for number in range(3) if number != damaged]
    for _ in range(2):
        dataset = JsonLinesDataset(archive, on_error="skip")
        assert list(dataset) == [*whole, *[3] * 99, 4]
        assert len(list(cache.iterdir())) == 3  # the one of 198 bytes has its own, and parts the others
    with pytest.raises(DataError, match=rf"{damaged}\.jsonl\.gz::.* cannot be read"):
        JsonLinesDataset(archive)


@pytest.mark.parametrize("name", ["all.tar", "all.zip"])
def test_an_archive_behind_a_url(tmp_path, name):
    path = pack(tmp_path / name, SHARDS)
    url = f"memory://{tmp_path.name}/{name}"
    fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/{name}", path.read_bytes())
    dataset = JsonLinesDataset(url)
    assert dataset.__getitems__(list(range(len(dataset)))) == [1, 2, 3, 4, 5, 6, 7]


def test_a_chained_url_chooses_the_files_of_an_archive(tmp_path):
    archive = pack(tmp_path / "all.tar", SHARDS)
    assert TextDataset(f"tar://*.md::{archive}")[0] == "# Shards"
    assert list(JsonLinesDataset(f"tar://b/2.jsonl::file://{archive}")) == [4, 5]
    assert list(JsonLinesDataset(f"zip://b/*.jsonl::{pack(tmp_path / 'all.zip', SHARDS)}")) == [4, 5]


def test_of_two_members_of_a_name_the_last_one_counts(tmp_path):
    """As when an archive is unpacked: `tar --append` writes a new version behind the old one."""
    path = pack(tmp_path / "all.tar", {"a.txt": b"old\n"})
    with tarfile.open(path, "a") as tar:
        member = tarfile.TarInfo("./a.txt")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"new\n"))
    assert list(TextDataset(path)) == ["new"]


@pytest.mark.parametrize("name", ["all.tar", "all.zip", "all.tar.gz"])
def test_row_groups_of_an_archive(tmp_path, name):
    files = {}
    for number in range(2):
        stored = io.BytesIO()
        table = pa.table({"x": range(1000 * number, 1000 * (number + 1))})
        pq.write_table(table, stored, row_group_size=600)
        files[f"{number}.parquet"] = stored.getvalue()
    dataset = ParquetDataset(pack(tmp_path / name, files | {"notes.txt": b"notes"}))
    assert dataset.block_sizes() == [600, 400, 600, 400]
    assert dataset.__getitems__(list(range(2000))).columns["x"].tolist() == list(range(2000))


@pytest.mark.parametrize("name", ["all.tar", "all.tar.gz", "all.zip"])
def test_a_name_in_an_archive_is_never_a_part_of_a_url(tmp_path, name):
    """It was: a stranger's archive read another file of the user, or called a server."""
    (tmp_path / "x.jsonl").write_text('"private"')
    files = {f"m::file:/{tmp_path}/x.jsonl": b"1\n", "m::ftp://127.0.0.1:1/x.jsonl": b"2\n"}
    archive = pack(tmp_path / name, files | {"a::b.jsonl.gz": gzip.compress(b"3\n")})
    assert sorted(JsonLinesDataset(archive)) == [1, 2, 3]
    protocol = "zip" if name.endswith("zip") else "tar"
    with pytest.raises(DataError, match="of which a part would be read as a URL"):
        JsonLinesDataset(f"{protocol}://**/*.jsonl::{archive}")


@pytest.mark.parametrize("name", ["all.tar.gz", "all.zip", *slow("all.tar.bz2", "all.tar.xz")])
def test_a_cut_or_damaged_archive_gives_the_same_files_or_an_error(tmp_path, name):
    """Of a tar.gz one bit of 60 was taken in 12, and a cut one was read short: nobody looked at its end."""

    def read(data):
        archive.write_bytes(data)
        files = list_contents(archive, (".jsonl",), tmp_path / "cache")
        return [(file.open().read([(0, file.size)]), file.size) for file in files]

    # The second name has 18 bytes: with a bit more in the comment of the first entry of a zip it is lost.
    archive = pack(tmp_path / name, {f"{'n' * 12}{number}.jsonl"[-18:]: b"1\n" * 9 for number in range(3)})
    good, draw = archive.read_bytes(), random.Random(0)
    whole = read(good)
    damaged = [good[:size] for size in range(0, len(good), 5)]
    for place in draw.sample(range(8 * len(good)), 100):
        flipped = bytearray(good)
        flipped[place // 8] ^= 1 << place % 8
        damaged.append(bytes(flipped))
    num_refused = 0
    for data in damaged:
        try:
            assert read(data) == whole
        except DataError as error:
            num_refused += str(archive) in str(error)
    assert num_refused > len(damaged) / 2


def test_a_lost_entry_of_a_zip_is_told(tmp_path):
    """One bit of the list, which has no checksum, makes a comment of the next entry."""
    archive = pack(tmp_path / "all.zip", {"n.txt": b"1\n", f"{'n' * 14}.txt": b"2\n", "o.txt": b"3\n"})
    data = bytearray(archive.read_bytes())
    of_folder = data.index(b"PK\1\2")
    data[data.index(b"PK\1\2", of_folder + 1) + 32] ^= 64  # the length of its comment
    archive.write_bytes(data)
    with pytest.raises(DataError, match=r"BadZipFile: the entry n\.txt is damaged"):
        TextDataset(archive)


@pytest.mark.parametrize("name", ["all.tar.gz", "all.zip"])
def test_what_is_unpacked_has_a_bound(tmp_path, cache, name):
    """A few bytes could fill the disk."""
    archive = pack(tmp_path / name, {"a.txt": b"1\n" * 2**20})
    with pytest.raises(DataError, match=r"holds more than 0\.0 GiB\. .* a larger unpacked_gib"):
        TextDataset(archive, unpacked_gib=1e-3)
    assert not list(cache.glob("*.new"))
    assert len(TextDataset(archive, unpacked_gib=3e-3)) == 2**20


def test_an_archive_must_not_change(tmp_path):
    path = pack(tmp_path / "all.tar", SHARDS)
    dataset = JsonLinesDataset(path)
    assert dataset[0] == 1
    with path.open("ab") as file:
        file.write(bytes(512))
    with pytest.raises(DataError, match=r"all\.tar has changed while it was in use"):
        dataset.__getitems__([0])


def test_what_cannot_be_read_is_said(tmp_path, cache):
    def refused(path, match, dataset=TextDataset):
        with pytest.raises(DataError, match=match):
            dataset(path)

    none = pack(tmp_path / "none.tar", {"a.md": b"x", "b.md": b"x"})
    refused(none, rf"holds no file that ends in \.txt: it holds a\.md, b\.md\. .* tar://\*\.ENDING::{none}\.")
    refused(pack(tmp_path / "empty.zip", {}), "it holds none.*zip://")
    refused(f"tar://c.md::{none}", "none.tar has no file c.md")
    refused(pack(tmp_path / "out.tgz", {"../a.txt": b"x"}), r"out\.tgz holds no file .* it holds \.\./a\.txt")
    for name in ("broken.tar", "broken.zip", "broken.tar.gz"):
        (tmp_path / name).write_bytes(b"no archive" * 100)
        refused(tmp_path / name, f"{name} cannot be (read|unpacked into the cache folder)")
    whole = pack(tmp_path / "cut.tar", {"a.txt": bytes(5000)}).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:3000])
    refused(tmp_path / "cut.tar", "cut.tar cannot be read: ReadError: unexpected end of data")
    refused(f"zip://c.md::{tmp_path / 'empty.zip'}", "empty.zip has no file c.md")
    refused(tmp_path / "gone.zip", "gone.zip cannot be read: No such file")
    refused(pack(tmp_path / "a.tar", {"a.txt": b""}), r"a\.txt::.* is empty")
    window = {"a.bin": bytes(100)}
    tokens = f"tar://a.bin::{pack(tmp_path / 'tokens.tar', window)}"
    refused(tokens, "cannot be mapped into memory", lambda path: TokenDataset(path, window=4))
    assert not list(cache.glob("*.new"))


def test_a_cache_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("no folder")
    archive = pack(tmp_path / "all.zip", SHARDS)
    with pytest.raises(
        DataError, match=r"all\.zip cannot be unpacked into the cache folder: .*Unpack it else"
    ):
        JsonLinesDataset(archive, cache_dir=tmp_path / "file" / "cache")
