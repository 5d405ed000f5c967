"""Writes what benchmarks/results.md says into the pages that sum it up: `python docs/write_benchmarks.py`.

A page has it between `<!-- measured: NAME -->` and `<!-- end -->`; NAME is that of a function here.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results.md"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
SHOWN = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SIDES = ("lanewise", "Ignite", "Fabric", "Accelerate", "Lightning", "HF Trainer")
TINY = "a model that costs almost nothing"
STEPS = (
    (TINY, "1"),
    (TINY, "2"),
    ("ConvNet, 4 x 16", "1"),
    ("ConvNet, 4 x 16", "2"),
    ("GPT, 4 x 8", "1"),
    ("GPT, 4 x 8", "2"),
)
NAMES = {
    "ConvNet, 4 x 16": "MNIST ConvNet, 4 micro-batches of 16",
    "GPT, 4 x 8": "character GPT, 4 micro-batches of 8",
}
WHY = "For each lane lanewise seeds all random generators, a loop by hand none."


def section(program: str) -> str:
    """Return the section of results.md that a program wrote."""
    sections = re.split(r"^(?=## )", RESULTS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (found,) = [one for one in sections if f"\n    python benchmarks/{program}.py\n" in one]
    return found


def value(program: str, *row: str, column: str) -> str:
    """Return the median in the row that begins with some cells, in the first table that has the column."""
    header: list[str] = []
    for line in section(program).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
        elif column in header and tuple(cells[: len(row)]) == row:
            return cells[header.index(column)].partition(" (")[0]
    raise SystemExit(f"the section of {program}.py has no row {' | '.join(row)} with the column {column}")


def about(text: str) -> str:
    """Return a number with three digits that count."""
    number = float(text.replace(",", ""))
    return f"{float(f'{number:.3g}'):,.0f}" if number >= 100 else f"{number:.2g}"


def step(model: str, num_processes: str, side: str) -> str:
    """Return the time of a step of a side over one by hand."""
    if model != TINY:
        return value(
            "speed", model, num_processes, side.replace("lanewise", "lanewise train"), column="time / by hand"
        )
    tables = section("tiny_step").split(f"\n| {num_processes} process(es)")[1]
    found = re.search(rf"^\| {side} \|.*\| ([\d.]+) \(", tables, flags=re.MULTILINE)
    assert found, f"tiny_step.py has no row of {side}"
    return found[1]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        f"| {' | '.join(line)} |".replace("| --- |", "|---|").replace(" --- |", "---|") for line in lines
    )


def facts(program: str) -> str:
    """Return when, of what and on what a program measured."""
    found = re.search(
        r"^(\d{4}-\d\d-\d\d),(.*)\.\n(torch [^,.]+\.[^,]+)", section(program), flags=re.MULTILINE
    )
    assert found, f"the section of {program}.py has no date"
    return f"Medians of {found[1]},{found[2]}, {found[3]}."


def step_table(steps: Sequence[tuple[str, str]]) -> str:
    """Return the times of a step beside other libraries, and where lanewise is behind one."""
    rows, behind = [], []
    for model, num in steps:
        times = [step(model, num, side) for side in SIDES]
        is_same = bool(rows) and steps[len(rows) - 1][0] == model
        rows.append(["the same" if is_same else NAMES.get(model, model), num, *times])
        quicker = [side for side, time in zip(SIDES, times, strict=True) if float(time) < float(times[0])]
        if quicker:
            what = NAMES.get(model, model).partition(",")[0]
            behind.append(f"{' and '.join(quicker)} ({what}, {num} process{'es' if num != '1' else ''})")
    said = f"{table(['a step of', 'processes', *SIDES], rows)}\n\n{facts('speed')}"
    return f"{said} lanewise is behind {'; '.join(behind)}." if behind else said


def short_steps() -> str:
    """Return what README shows."""
    return step_table(STEPS[2:])


def steps() -> str:
    """Return what the page of the benchmarks shows."""
    shown = step_table(STEPS)
    is_behind = f"({TINY}, 1 process)" in shown
    return f"{shown} {WHY}" if is_behind else shown


def costs() -> str:
    """Return what features cost."""
    return table(
        ["question", "answer", "in `benchmarks`"],
        [[*row, f"`{program}.py`"] for program, *row in cost_rows()],
    )


def cost_rows() -> Iterator[tuple[str, str, str]]:
    """Yield the program, the question and the answer of each cost."""
    models = ("ConvNet, 4 x 16", "GPT, 4 x 8")
    of_ceiling = {
        side: [value("scaling", model, side, column="of the ceiling") for model in models]
        for side in ("lanewise train", "hand-written")
    }
    yield (
        "scaling",
        "two processes over one, of the speed that two cores can give",
        "{} for the ConvNet, {} for the GPT; by hand with DDP {} and {}".format(
            *of_ceiling["lanewise train"], *of_ceiling["hand-written"]
        ),
    )
    started = value("start", "lanewise train", column="time / hand-written")
    yield "start", "the time of a run of one step on two processes, over a torchrun script with DDP", started
    saves = [value("checkpoint", way, column="seconds") for way in ("lanewise", "torch.save")]
    yield "checkpoint", "how long a save of 1.2 GB stops the loop", "{} s; `torch.save` {} s".format(*saves)
    first = [value("resume", side, column="ms to the first batch") for side in ("lanewise", "hand-written")]
    yield (
        "resume",
        "the first batch after a resume in the middle of two million samples",
        "{} ms, and the next batch; a sampler by hand {} ms".format(*map(about, first)),
    )
    billion = [
        value("order", "1,000,000,000", "lanewise", column=one) for one in ("ms to the first batch", "MiB")
    ]
    yield (
        "order",
        "the first batch of a billion samples in random order",
        "{} ms and {} MiB; torch's samplers would need 40 GB".format(*billion),
    )
    rows = [
        value("parquet", side, column="rows/s") for side in ("lanewise, blocked", "Hugging Face datasets")
    ]
    yield (
        "parquet",
        "rows from Parquet in random order",
        "{} a second; `datasets` of Hugging Face {}".format(*map(about, rows)),
    )
    sides = ("lanewise", "DataLoader, split by hand")
    streamed = [value("streams", side, "1", "0", column="samples/s") for side in sides]
    yield (
        "streams",
        "samples of a stream of JSON lines",
        "{} a second; a DataLoader split by hand {}".format(*map(about, streamed)),
    )
    lanes = ("1", "2", "8")
    shuffled = sorted(value("shuffle", num, "shuffled", column="accuracy") for num in lanes)
    blocked = sorted(
        value("shuffle", num, "blocked", blocks, column="accuracy")
        for num in lanes
        for blocks in ("10", "160")
    )
    yield (
        "shuffle",
        "accuracy after reading block by block instead of a full shuffle",
        f"{blocked[0]} to {blocked[-1]}, of a full shuffle {shuffled[0]} to {shuffled[-1]}",
    )
    memory = [value("activation_checkpointing", side, column="MiB") for side in ("lanewise", "without")]
    slower = value("activation_checkpointing", "lanewise", column="CPU time / without")
    yield (
        "activation_checkpointing",
        "activation checkpointing of 36 layers",
        f"{memory[0]} MiB instead of {memory[1]}, in {slower} of the time",
    )
    compiled = value("compile", "auto", column="times as fast as eager")
    yield "compile", "compiled blocks of the GPT, on a CPU", f"{compiled} of eager's speed"
    queue = value("step_state", "`step_state`", column="time of a step")
    yield "step_state", "a queue of 65,536 keys as state of the step, over one by hand", queue
    of_words = {
        column: value("linear_cross_entropy", "8,000", "128", "lanewise", column=column)
        for column in ("CPU time / by hand", "of that by hand")
    }
    yield (
        "linear_cross_entropy",
        "loss of 8,000 tokens of width 128 and 40,000 words, over `cross_entropy(linear(...))`",
        "{} of the CPU time and {} of the memory".format(*of_words.values()),
    )
    sizes = [
        value("batch_loss", way, column="MiB of the process")
        for way in ("one graph", "`batch_loss`", "`row_loss`")
    ]
    over = value("batch_loss", "`batch_loss`", column="/ (accumulation + a forward)")
    yield (
        "batch_loss",
        "a contrastive step of 4,096 digits in 64 lanes",
        "{} MiB as one graph, {} with `batch_loss`, {} with `row_loss`; {} of the time of the "
        "accumulation and one more forward".format(*sizes, over),
    )


def grades() -> str:
    """Return what `exact` costs."""
    models = ("MLP, 4 x 8", "ConvNet, 4 x 16", "GPT, 4 x 8")
    rows = [
        [model, *(value("exact", model, num, column="`exact` / `close`") for num in "12")] for model in models
    ]
    return table(["model", "1 process", "2 processes"], rows)


def negatives() -> str:
    """Return how wrong the gradients of contrastive losses are."""
    ways = {
        "own negatives, the usual loss under DDP": "own negatives",
        "open_clip's `local_loss` without `gather_with_grad`": "`local_loss`",
        "open_clip's defaults: right but for a factor of 1 / N": "open_clip's defaults",
        "open_clip's `gather_with_grad`": "`gather_with_grad`",
        "lanewise, `batch_loss` and `row_loss`": "lanewise, `batch_loss`",
    }
    columns = ("2 processes", "4 processes")
    rows = [[said, *(value("negatives", way, column=one) for one in columns)] for said, way in ways.items()]
    return table(["way", *columns], rows)


WRITERS: dict[str, Callable[[], str]] = {
    one.__name__: one for one in (short_steps, steps, costs, grades, negatives)
}


def write_page(page: Path) -> str:
    """Return what a page says, with what was measured last."""
    return SHOWN.sub(
        lambda found: f"{found[1]}{WRITERS[found[2]]()}\n{found[3]}", page.read_text(encoding="utf-8")
    )


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(write_page(path), encoding="utf-8")
