"""Windows of token files: no token is a target twice, and no window crosses a file's border."""

import copy
import logging
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lanewise.data import FileDataset, TokenDataset
from lanewise.errors import DataError


def write(folder, *arrays, dtype="uint16", suffix=".bin"):
    for number, array in enumerate(arrays):
        tokens = np.asarray(array, dtype)
        path = folder / f"{number}{suffix}"
        np.save(path, tokens) if suffix == ".npy" else tokens.tofile(path)
    return folder / f"*{suffix}"


@given(
    st.lists(st.integers(7, 40), min_size=1, max_size=3),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_windows_lie_in_files_at_every_stride(tmp_path_factory, lengths, window, stride):
    folder = tmp_path_factory.mktemp("tokens")
    arrays = [np.arange(length) + 100 * number for number, length in enumerate(lengths)]
    dataset = TokenDataset(write(folder, *arrays), window=window, stride=stride)
    step = stride or window
    expected = [
        array[begin : begin + window + 1].tolist()
        for array in arrays
        for begin in range(0, len(array) - window, step)
    ]
    assert [sample.tolist() for sample in dataset] == expected
    assert len(dataset) == len(expected)


def test_each_token_is_a_target_once(tmp_path):
    dataset = TokenDataset(write(tmp_path, range(17)), window=4)
    targets = [sample[1:].tolist() for sample in dataset]
    assert sum(targets, []) == list(range(1, 17))  # noqa: RUF017 - short


@pytest.mark.parametrize("dtype", ["uint32", "int32", "int64"])
@pytest.mark.parametrize("vocabulary", [200, 50_257, 256_000])
def test_longer_tokens_are_not_read_as_halves_by_default(tmp_path, dtype, vocabulary):
    """Each was read as two or more, most of them 0, and a model was trained on these."""
    tokens = np.random.default_rng(0).integers(vocabulary, size=500)
    pattern = write(tmp_path, tokens, dtype=dtype)
    with pytest.raises(
        DataError, match=r"0\.bin seems to hold tokens of 4 bytes, .* as in dtype='uint32', or"
    ):
        TokenDataset(pattern, window=499)
    assert TokenDataset(pattern, window=499, dtype=dtype)[0].tolist() == tokens.tolist()
    assert len(TokenDataset(pattern, window=499, dtype="uint16")) >= 2  # if that is what they are


@pytest.mark.parametrize("vocabulary", [2, 5, 256, 50_257])
def test_tokens_of_two_bytes_are_taken_for_what_they_are(tmp_path, vocabulary):
    tokens = np.random.default_rng(1).integers(vocabulary, size=5000)
    assert TokenDataset(write(tmp_path, tokens), window=4999)[0].tolist() == tokens.tolist()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", ">u4", "int64"])
@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_windows_of_any_integers_are_int64(tmp_path, dtype, suffix):
    pattern = write(tmp_path, range(10), range(100, 110), dtype=dtype, suffix=suffix)
    given_dtype = {} if suffix == ".npy" else {"dtype": dtype}
    dataset = TokenDataset(pattern, window=3, **given_dtype)
    assert isinstance(dataset, FileDataset)
    samples = dataset.__getitems__([4, 0, 5, 0])
    assert [sample.dtype for sample in samples] == [torch.int64] * 4
    expected = [[103, 104, 105, 106], [0, 1, 2, 3], [106, 107, 108, 109], [0, 1, 2, 3]]
    assert [sample.tolist() for sample in samples] == expected
    assert dataset.read_bytes == 4 * 4 * np.dtype(dtype).itemsize
    assert dataset.total_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert dataset.num_skipped == 0
    assert not hasattr(dataset, "block_sizes")


def test_samples_are_rows_of_one_tensor(tmp_path):
    samples = TokenDataset(write(tmp_path, range(20)), window=3).__getitems__([2, 0])
    assert samples[0].untyped_storage().data_ptr() == samples[1].untyped_storage().data_ptr()


def test_a_line_tells_what_is_left_out(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    pattern = write(tmp_path, range(10), range(13), range(2))
    TokenDataset([tmp_path / "0.bin", tmp_path / "1.bin"], window=3)
    assert caplog.records == []
    TokenDataset(pattern, window=1)
    assert caplog.records == []
    TokenDataset([tmp_path / "0.bin", tmp_path / "1.bin"], window=5)
    (record,) = caplog.records
    assert record.message.startswith("6 of 23 tokens are left out")


def test_the_fingerprint(tmp_path):
    def fingerprint(*arrays, dtype="uint16", **arguments):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return TokenDataset(write(folder, *arrays, dtype=dtype), dtype=dtype, **arguments).fingerprint()

    expected = fingerprint(range(20), range(10), window=4)
    assert expected == fingerprint(range(20), range(10), window=4, stride=4)
    others = [
        fingerprint(range(10), range(20), window=4),
        fingerprint(range(20), range(10), window=5),
        fingerprint(range(20), range(10), window=4, stride=3),
        fingerprint(range(20), range(10), window=4, dtype="uint32"),
    ]
    assert len({expected, *others}) == 5


def test_copies_and_workers_read_it(tmp_path):
    dataset = TokenDataset(write(tmp_path, range(17)), window=4)
    assert dataset[0].tolist() == [0, 1, 2, 3, 4]
    for copied in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert copied[1].tolist() == [4, 5, 6, 7, 8]
    assert len(pickle.dumps(dataset)) < 2000
    batches = list(DataLoader(dataset, batch_size=2, num_workers=1, multiprocessing_context="fork"))
    assert torch.cat(batches)[:, 0].tolist() == [0, 4, 8, 12]


@pytest.mark.parametrize("num_tokens", [5, 500])
def test_a_file_that_changes_is_an_error_and_no_crash(tmp_path, num_tokens):
    dataset = TokenDataset(write(tmp_path, range(100)), window=4)
    dataset[-1]
    write(tmp_path, range(num_tokens))
    with pytest.raises(DataError, match=r"0\.bin has changed.*200 bytes"):
        dataset[-1]
    with pytest.raises(DataError, match=r"0\.bin has changed"):
        pickle.loads(pickle.dumps(dataset))[0]


def refused(path, message, **arguments):
    with pytest.raises(DataError, match=message):
        TokenDataset(path, **{"window": 4} | arguments)


def test_wrong_files_and_arguments_are_refused(tmp_path):
    pattern = write(tmp_path, range(4))
    refused(pattern, r"0\.bin has 4 tokens, and a window with its targets takes 5")
    refused(pattern, "8 bytes, no multiple of the 16 of complex128|holds complex128", dtype="complex128")
    refused(pattern, r"0\.bin holds float32, it seems", dtype="float32")
    refused(pattern, "dtype is 'tokens', which numpy doesn't know", dtype="tokens")
    refused(pattern, "window is 0 and stride is 0", window=0)
    refused(pattern, "window is 1 and stride is 0", window=1, stride=0)
    (tmp_path / "odd").write_bytes(b"123")
    refused(tmp_path / "odd", r"odd has 3 bytes, no multiple of the 2 of uint16")
    (tmp_path / "a.gz").write_bytes(b"1234")
    refused(tmp_path / "a.gz", r"a\.gz cannot be mapped into memory")
    (tmp_path / "a.npy").write_bytes(b"1234")
    refused(tmp_path / "a.npy", r"a\.npy cannot be read: ValueError")
    np.save(tmp_path / "b.npy", np.zeros((2, 3), "int64"))
    refused(tmp_path / "b.npy", r"b\.npy is an array of shape \[2, 3\]")
    np.save(tmp_path / "c.npy", np.zeros(9))
    refused(tmp_path / "c.npy", r"c\.npy holds float64, it seems")
    (tmp_path / "empty").touch()
    refused(tmp_path / "empty", r"empty is empty \(0 bytes\)")
    refused("memory://a.bin", r"memory://a\.bin cannot be")
