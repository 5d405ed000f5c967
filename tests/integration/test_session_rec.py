"""The example of next-item recommendation: from a click log to a model that beats simple rules."""

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lanewise.data import ParquetDataset
from lanewise.errors import DataError
from lanewise.testing import run_distributed
from tests.integration.command import ROOT, train

pytest.importorskip("pyarrow")

MSWEB = Path(os.environ.get("LANEWISE_DATA", "/nonexistent")) / "msweb"
EXAMPLE = ROOT / "examples" / "session_rec"
CONFIG = EXAMPLE / "session_rec.yaml"
SMALL = (
    "--task.init_args.model={num_layers: 1, num_heads: 2, width: 16, context: 5}",
    "--batch.global_batch_size=16",
    "--batch.micro_batch_size=4",
    "--train.max_steps=3",
    "--train.epochs=null",
)


@pytest.fixture(scope="module")
def example() -> SimpleNamespace:
    """The example's modules; other examples may have some of the same names."""
    names = ("sessions", "session_rec", "prepare", "baselines")
    of_others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(EXAMPLE))
    modules = {name: importlib.import_module(name) for name in names}
    sys.path.remove(str(EXAMPLE))
    for name in names:
        del sys.modules[name]
    sys.modules.update(of_others)
    return SimpleNamespace(**modules)


def write_csv(path: Path, sessions: dict[str, str], header: str = "time,session,item") -> Path:
    """Write a click for each letter of each session: the sessions a minute apart, the clicks a second."""
    lines = [
        f"2026-03-01T12:{minute:02}:{second:02},{name},{item}"
        for minute, (name, items) in enumerate(sessions.items())
        for second, item in enumerate(items)
    ]
    path.write_text("\n".join([header, *lines[::-1]]) + "\n")  # the latest one first
    return path


def read(folder: Path, items: list[str], part: str) -> dict[str, str]:
    """Return the sessions of a part, as `write_csv` takes them."""
    rows = ParquetDataset(f"{folder}/{part}/*.parquet")
    return {row["session"]: "".join(items[item - 1] for item in row["items"]) for row in rows}


def test_a_csv_becomes_parquet_of_unequal_row_groups(tmp_path, example):
    sessions = {f"s{number}": "abcdefgh"[: 1 + number % 4] for number in range(50)}
    example.prepare.prepare_csv(write_csv(tmp_path / "log.csv", sessions), tmp_path / "data", share=0.25)
    items = example.sessions.read_items(tmp_path / "data")
    parts = {part: read(tmp_path / "data", items, part) for part in ("train", "held_out")}
    longer = {name: visited for name, visited in sessions.items() if len(visited) > 1}
    assert {**parts["train"], **parts["held_out"]} == longer
    assert list(parts["held_out"]) == list(longer)[-9:]  # a quarter of 37; they begin last
    lengths = ParquetDataset(f"{tmp_path}/data/train/*.parquet", columns=["length"])
    assert [row["length"] for row in lengths] == list(map(len, parts["train"].values()))


def test_row_groups_are_of_unequal_sizes_in_several_files(tmp_path, example):
    sessions = [(str(number), ["a", "b"]) for number in range(300)]
    parts = {"train": sessions, "held_out": sessions[:5]}
    example.sessions.write_sessions(tmp_path / "data", ["a", "b"], parts, rows_per_group=20)
    sizes = ParquetDataset(f"{tmp_path}/data/train/*.parquet").block_sizes()
    assert list(sizes) == [20, 6, 34, 12, 28] * 3
    assert len(list((tmp_path / "data" / "train").iterdir())) == 8


def test_the_areas_and_users_of_msweb_are_read(tmp_path, example):
    (tmp_path / "log").write_text(
        'I,4,"www"\nT,1,"VRoot",0,0,"VRoot"\nN,0,"0"\nA,1287,1,"Auto, Route","/auto"\nA,1288,1,"l","/l"\n'
        'C,"10001",10001\nV,1288,1\nV,1287,1\nC,"10002",10002\nV,1287,1\n'
    )
    items, sessions = example.prepare.read_msweb(tmp_path / "log")
    assert items == ["1287", "1288"]
    assert sessions == [("10001", ["1288", "1287"]), ("10002", ["1287"])]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"log cannot be read as comma-separated text"),
        ("", r"has no column session and none time and none item"),
        ("session,item\na,b\n", r"has no column time; its first line is 'session,item'.*must name"),
        ("session,time,item\na,1,x\na,noon,y\n", r"log:3: .*time 'noon'.*a time is a number or a date"),
        ("session,time,item\na,nan,x\n", r"log:2: .*time 'nan'"),
        ("session,time,item\na,1,\n", r"log:2: .*item ''"),
        ("session,time,item\na,1,x,y\n", r"log:2 has 4 fields, and the first line 3"),
        ("session,time,item\na,1,x\nb,2,y\n", r"No session of train has two items"),
        ("session,time,item\na,1,x\na,2,y\n", r"No session of held_out has two items"),
        (b"PAR1\x15\x04", r"log is Parquet, which needs no preparing: .*ParquetDataset"),
        (b"session,time,item\na,1,\xff\n", r"log cannot be read as comma-separated text"),
    ],
)
def test_a_bad_csv_is_one_clear_error(tmp_path, example, monkeypatch, content, said):
    source = tmp_path / "log"
    if content is not None:
        source.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setattr(sys, "argv", ["prepare.py", "csv", str(source), str(tmp_path / "data")])
    with pytest.raises(SystemExit, match=f"(?s)^error: .*{said}"):
        example.prepare.main()
    assert list(tmp_path.iterdir()) == ([] if content is None else [source])


def test_another_format_a_folder_that_is_there_and_one_that_is_not_are_errors(tmp_path, example):
    (tmp_path / "log").write_text("V,1000,1\n")
    with pytest.raises(DataError, match=r"log:1 is no line of this format"):
        example.prepare.read_msweb(tmp_path / "log")
    with pytest.raises(DataError, match=r"--held-out must be a share between 0 and 1.*got 10"):
        example.prepare.prepare_csv(tmp_path / "log", tmp_path / "data", share=10)
    with pytest.raises(DataError, match=r"is there already. Remove it"):
        example.sessions.write_sessions(tmp_path, [], {})
    with pytest.raises(DataError, match=r"is no folder of sessions.*Make one with"):
        example.session_rec.SessionRec(tmp_path / "nowhere")


def test_the_baselines_rank_as_counted_by_hand(tmp_path, example):
    # In training b follows a twice and c once; clicks: a 3, b 3, c 2, d 1.
    train_sessions = [("1", "ab"), ("2", "abc"), ("3", "ac"), ("4", "db")]
    parts = {"train": train_sessions, "held_out": [("5", "ac"), ("6", "bd")]}
    example.sessions.write_sessions(tmp_path / "data", "abcd", parts)
    values = example.baselines.evaluate(example.session_rec.SessionRec(tmp_path / "data"))
    # Popularity: after a, c comes behind b; after b, d is last behind a and c, as b was seen.
    assert values["popularity"]["mrr"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    # The chain: after a, b came more often than c; after b only c came, and a is more popular than d.
    assert values["Markov chain"]["mrr"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    repeats = example.session_rec.SessionRec(tmp_path / "data", may_repeat=True)
    assert example.baselines.evaluate(repeats)["popularity"]["mrr"] == pytest.approx((1 / 3 + 1 / 4) / 2)


def test_items_of_the_session_are_not_ranked_and_the_last_ones_are_kept(tmp_path, example):
    parts = {"train": [("1", "abcda")], "held_out": [("2", "abcd"), ("3", "ba")]}
    example.sessions.write_sessions(tmp_path / "data", "abcd", parts)
    task = example.session_rec.SessionRec(tmp_path / "data", example.session_rec.ModelConfig(context=2))
    held_out = task.eval_datasets()["held_out"]
    batch = task.collate(held_out.__getitems__([0, 1]))
    assert batch["items"].tolist() == [[2, 3, 4], [2, 1, 0]]
    assert batch["num_targets"] == 3
    seen, last = example.session_rec.split_last(batch)
    assert (seen.tolist(), last.tolist()) == ([[2, 3, 0], [2, 0, 0]], [4, 1])
    scores = example.session_rec.ranked(torch.ones(2, 5), seen, may_repeat=False)
    assert scores.isinf().tolist() == [[True, False, True, True, False], [True, False, True, False, False]]


def test_negatives_of_the_step_are_its_other_targets(tmp_path, example):
    parts = {"train": [("1", "abcda"), ("2", "ca")], "held_out": [("3", "ab")]}
    example.sessions.write_sessions(tmp_path / "data", "abcdefg", parts)
    task = example.session_rec.InBatchSessionRec(
        tmp_path / "data", example.session_rec.ModelConfig(context=6)
    )
    model = task.build_model()
    batch = task.collate(task.train_dataset().__getitems__([0, 1]))
    assert batch["items"].tolist() == [[1, 2, 3, 4, 1, 0, 0], [3, 1, 0, 0, 0, 0, 0]]
    outputs, inputs = task.forward(model, batch), task.batch_loss_inputs(batch)
    lanes = [task.row_loss(model, outputs, inputs, rows) for rows in (slice(0, 1), slice(1, 2))]
    # Targets are b c d a and a; of the items from e on, which are no target, the loss knows nothing.
    logits = model.head.logits(torch.cat([outputs.hidden[0, :4], outputs.hidden[1, :1]]))[:, 1:5]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([1, 2, 3, 0, 0]), reduction="none")
    assert [lane.weight for lane in lanes] == [4, 1]
    assert torch.allclose(
        torch.stack([lane.sum for lane in lanes]), torch.stack([expected[:4].sum(), expected[4]])
    )
    assert outputs.scores is None
    assert task.forward(model.eval(), batch).scores.shape == (2, 8)


def generate(world, cache: str) -> str:
    os.environ["XDG_CACHE_HOME"] = cache
    sys.path.insert(0, str(EXAMPLE))
    from sessions import generated_sessions

    return ParquetDataset(f"{generated_sessions()}/train/*.parquet").fingerprint()


def test_generated_sessions_are_the_same_from_processes_that_start_at_once(tmp_path, example, monkeypatch):
    found = run_distributed(generate, 2, str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    folder = example.sessions.generated_sessions()
    again = ParquetDataset(f"{folder}/train/*.parquet").fingerprint()
    assert found == [again, again]
    assert len(list((tmp_path / "a" / "lanewise").iterdir())) == 1  # no process left anything else


def model_bytes(run_dir: Path) -> bytes:
    return (run_dir / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_config_trains_as_it_is_on_sessions_that_it_says_are_generated(tmp_path):
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    for devices in (1, 2):
        overrides = (*SMALL, f"--train.run_dir={tmp_path / str(devices)}", f"--distributed.devices={devices}")
        done = train(CONFIG, *overrides, variables=variables).require_success()
        assert "the sessions are generated" in done.stdout + done.stderr
    assert model_bytes(tmp_path / "1") == model_bytes(tmp_path / "2")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not MSWEB.exists(), reason="the click log is not in $LANEWISE_DATA/msweb")
def test_on_real_sessions_it_beats_popularity_and_the_chain(tmp_path, example):
    folder, run_dir = tmp_path / "data", tmp_path / "run"
    example.prepare.prepare_msweb(MSWEB, folder)
    overrides = (
        f"--task.init_args.folder={folder}",
        f"--train.run_dir={run_dir}",
        "--train.epochs=4",
        "--distributed.devices=2",
    )
    train(CONFIG, *overrides, patience_seconds=840).require_success()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = next(line for line in reversed(lines) if "held_out/loss" in line)
    for name, values in example.baselines.evaluate(example.session_rec.SessionRec(folder)).items():
        for metric, value in values.items():
            assert last[f"held_out/last_item/{metric}"] > value + 0.01, (name, metric)
