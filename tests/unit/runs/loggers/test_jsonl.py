"""metrics.jsonl: strict JSON, one line a step."""

import json
import time

import pytest

from lanewise.errors import StorageError
from lanewise.runs.callback import LargestLoss
from lanewise.runs.jumps import Jumps
from lanewise.runs.loggers.jsonl import JsonlLogger
from lanewise.runs.media import Media


def strict(line: str) -> dict:
    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def lines_of(path) -> list[dict]:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    lines = [strict(line) for line in text.splitlines()]
    for line in lines:
        line.pop("time", None)
    return lines


def test_one_line_for_each_step(tmp_path):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.on_step(0, 0, {"train/loss": 2.5, "perf/samples_per_second": 100.0})
    logger.on_step(1, 7, {"train/loss": 0.125})
    logger.on_end(None)
    assert lines_of(tmp_path / "metrics.jsonl") == [
        {"epoch": 0, "step": 0, "train/loss": 2.5, "perf/samples_per_second": 100.0},
        {"epoch": 1, "step": 7, "train/loss": 0.125},
    ]


def test_the_keys_stay_in_order(tmp_path):
    logger = JsonlLogger(tmp_path / "m")
    logger.on_step(0, 0, {"z": 1.0, "a": 2.0})
    logger.on_end(None)
    assert [*json.loads((tmp_path / "m").read_text())] == ["epoch", "step", "time", "z", "a"]


def test_a_line_has_the_time_in_seconds_since_the_epoch(tmp_path):
    before = time.time()
    logger = JsonlLogger(tmp_path / "m")
    logger.on_step(0, 0, {})
    logger.on_end(None)
    assert before <= strict((tmp_path / "m").read_text())["time"] <= time.time()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_json_lacks_becomes_null(tmp_path, value):
    logger = JsonlLogger(tmp_path / "m")
    logger.on_step(0, 0, {"train/loss": value, "train/lr": 1e-3})
    logger.on_end(None)
    assert lines_of(tmp_path / "m") == [{"epoch": 0, "step": 0, "train/loss": None, "train/lr": 1e-3}]


@pytest.mark.parametrize("value", [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0])
def test_a_float_comes_back_bit_for_bit(tmp_path, value):
    logger = JsonlLogger(tmp_path / "m")
    logger.on_step(0, 0, {"train/loss": value})
    logger.on_end(None)
    (line,) = lines_of(tmp_path / "m")
    assert line["train/loss"].hex() == value.hex()


def test_a_run_that_fails_before_its_first_step_leaves_no_file(tmp_path):
    JsonlLogger(tmp_path / "m").on_end(None)
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_there_from_the_first_step_on(tmp_path):
    logger = JsonlLogger(tmp_path / "m")
    logger.on_step(0, 0, {})
    assert (tmp_path / "m").exists()
    logger.on_end(None)


def test_a_line_is_written_when_its_step_ends(tmp_path):
    logger = JsonlLogger(tmp_path / "m")
    logger.on_step(0, 0, {"train/loss": 1.0})
    try:
        assert lines_of(tmp_path / "m") == [{"epoch": 0, "step": 0, "train/loss": 1.0}]
    finally:
        logger.on_end(None)


def test_what_is_there_is_kept(tmp_path):
    for step in range(2):
        logger = JsonlLogger(tmp_path / "m", after_step=step)
        logger.on_step(1, step + 1, {})
        logger.on_end(None)
        logger.on_end(None)  # harmless
    assert lines_of(tmp_path / "m") == [{"epoch": 1, "step": 1}, {"epoch": 1, "step": 2}]


def test_a_run_that_goes_on_cuts_the_lines_that_it_writes_again(tmp_path):
    path = tmp_path / "m"
    path.write_text('{"epoch": 1, "step": 1}\n{"epoch": 1, "step": 2}\n{"epoch": 1, "st')
    JsonlLogger(path, after_step=1)
    assert lines_of(path) == [{"epoch": 1, "step": 1}]


@pytest.mark.parametrize("is_logged", [True, False])
@pytest.mark.parametrize("evaluates_first", [False, True])
def test_a_run_that_evaluates_again_cuts_what_that_evaluation_gave(tmp_path, evaluates_first, is_logged):
    path = tmp_path / "m"
    first, *later = (f'{{"step": {step}, "train/learning_rate": 0.1}}\n' for step in (1, 2, 3))
    steps = [first, '{"step": 1, "test/loss": 3}\n', *(later[:1] if is_logged else [])]
    evaluation = '{"step": 2, "test/loss": 2}\n'
    path.write_text("".join([*steps, evaluation, later[1]]))
    JsonlLogger(path, 2, evaluates_first=evaluates_first)
    assert path.read_text() == "".join(steps if evaluates_first else [*steps, evaluation])


def test_texts_and_images_are_lines_of_a_file_of_their_own(tmp_path):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.on_media(0, 0, Media("text", text="a\nb"))
    logger.on_media(1, 4, Media("image", png=b"\x89PNG"))
    logger.on_end(None)
    first = {"epoch": 0, "step": 0, "name": "text", "text": "a\nb"}
    assert lines_of(tmp_path / "media.jsonl") == [
        first,
        {"epoch": 1, "step": 4, "name": "image", "png": "iVBORw=="},
    ]
    assert not (tmp_path / "metrics.jsonl").exists()
    JsonlLogger(tmp_path / "metrics.jsonl", after_step=4)  # which shows the model first
    assert lines_of(tmp_path / "media.jsonl") == [first]


DAMAGES = [
    b"\xff\xfe\n",
    b"5\n",
    b"{}\n",
    b'{"step": "2"}\n',
    b'{"step": true}\n',
    b"[" * 100_000 + b"\n",
    b"\n",
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: f"{damage!r:.20}")
def test_a_damaged_line_costs_itself_and_is_told(tmp_path, caplog, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + damage + b'{"step": 1}\n{"step": 2}\n')
    JsonlLogger(path, after_step=1)
    assert path.read_bytes() == b'{"step": 0}\n{"step": 1}\n'
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{path} was damaged: 1 lines that cannot be read are left out, the first of them was line 2"
    )


def test_what_a_killed_run_left_unfinished_is_no_damage(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"st')
    JsonlLogger(path, after_step=1)
    assert path.read_bytes() == b'{"step": 0}\n'
    assert not caplog.records


def test_a_link_in_its_place_is_never_written_through(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="it is a link"):
        JsonlLogger(tmp_path / "metrics.jsonl", after_step=1)
    (tmp_path / "precious").unlink()
    with pytest.raises(StorageError, match="it is a link"):
        JsonlLogger(tmp_path / "metrics.jsonl", after_step=1)
    assert not (tmp_path / "precious").exists()


def test_a_full_disk_is_one_error_that_names_the_file(small_disk):
    logger = JsonlLogger(small_disk / "metrics.jsonl")
    steps = (logger.on_step(0, step, {}) for step in range(10**6))
    with pytest.raises(
        StorageError, match=r"metrics\.jsonl cannot be written: No space left on device, .* free"
    ):
        list(steps)
    logger.on_end(None)


def test_a_line_without_end_is_not_read_whole(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("lanewise.runs.cut._MAX_LINE", 20)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + b"\0" * 50 + b'\n{"step": 1}\n')
    JsonlLogger(path, after_step=1)
    assert path.read_bytes() == b'{"step": 0}\n{"step": 1}\n'
    assert "1 lines that cannot be read are left out" in caplog.text


def test_digests_are_an_event_of_their_own(tmp_path):
    path = tmp_path / "m"
    logger = JsonlLogger(path)
    logger.on_digests(1, 2, {"model/weight": "00ff00ff00ff00ff"})
    logger.on_end(None)
    assert lines_of(path) == [
        {"event": "digests", "epoch": 1, "step": 2, "digests": {"model/weight": "00ff00ff00ff00ff"}}
    ]
    JsonlLogger(path, 2, evaluates_first=True)
    assert len(lines_of(path)) == 1  # it is no evaluation, which is cut as it is made again
    JsonlLogger(path, 1)
    assert path.read_text() == ""


LARGEST = LargestLoss(40.0, 25, 3, [7, 11])


def log(logger, losses, first=1):
    for step, loss in enumerate(losses, start=first):
        logger.on_largest_loss(1, step, LARGEST._replace(step=step))
        logger.on_step(1, step, {"train/loss": loss})
    logger.on_evaluation(1, first, {"held_out/loss": 1.0})
    logger.on_end(None)


def test_a_line_of_training_names_its_largest_loss(tmp_path):
    log(JsonlLogger(tmp_path / "m"), [2.0])
    largest = {"loss": 40.0, "step": 1, "lane": 3, "samples": [7, 11]}
    assert lines_of(tmp_path / "m") == [
        {"epoch": 1, "step": 1, "train/loss": 2.0, "largest_loss": largest},
        {"epoch": 1, "step": 1, "held_out/loss": 1.0},
    ]


@pytest.mark.parametrize("after_step", [24, 10])
def test_a_jump_is_a_line_and_a_warning_also_where_the_run_goes_on(tmp_path, caplog, after_step):
    """One that is cut off is found again, from the lines that stay."""
    losses = [*[2.0, 2.1] * 12, 9.0, 2.0]
    log(JsonlLogger(tmp_path / "m", jumps=(first := Jumps())), losses)
    assert first.steps == [25]
    (said,) = caplog.messages
    assert said == (
        "the loss jumped from 2.05 to 9 in the line of step 25. The largest was 40, in lane 3 of step 25, "
        f"samples [7, 11]. To see it again: lanewise replay {tmp_path} --step 25 --lane 3"
    )
    whole = lines_of(tmp_path / "m")
    assert [line for line in whole if line.get("event")] == [
        {
            "event": "jump",
            "epoch": 1,
            "step": 25,
            "loss": 9.0,
            "before": 2.05,
            "largest_loss": {"loss": 40.0, "step": 25, "lane": 3, "samples": [7, 11]},
        }
    ]
    again = JsonlLogger(tmp_path / "m", after_step, jumps=(second := Jumps()))
    assert second.steps == []
    log(again, losses[after_step:], first=after_step + 1)
    assert second.steps == [25]
    assert len(caplog.messages) == 2
    JsonlLogger(tmp_path / "m", 26, jumps=(third := Jumps()))
    assert third.steps == [25]


def test_without_a_lane_of_its_own_a_jump_names_its_step(tmp_path, caplog):
    logger = JsonlLogger(tmp_path / "m")
    for loss in [*[2.0, 2.1] * 12, 9.0]:
        logger.on_largest_loss(1, 3, LargestLoss(9.0, 3, None, []))
        logger.on_step(1, 3, {"train/loss": loss})
    logger.on_end(None)
    assert caplog.text.strip().endswith(f"9, in step 3. To see it again: lanewise replay {tmp_path} --step 3")
