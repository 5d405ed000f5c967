"""Writes sessions of two days in the form of Transformers4Rec's tutorials, to try the program with."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

draw = random.Random(0)
for day in ("1", "2"):
    folder = Path("sessions_by_day", day)
    folder.mkdir(parents=True, exist_ok=True)
    for name, num_sessions in (("train", 301), ("valid", 67)):
        first = [draw.randint(1, 50) for _ in range(num_sessions)]
        items = [[(item + 7 * at) % 50 + 1 for at in range(draw.randint(2, 9))] for item in first]
        columns = {
            "session_id": list(range(num_sessions)),
            "item_id-list": pa.array(items, pa.list_(pa.int64())),
            "category-list": pa.array([[1 + i % 5 for i in row] for row in items], pa.list_(pa.int64())),
            "age_days-list": pa.array(
                [[draw.random() for _ in row] for row in items], pa.list_(pa.float32())
            ),
        }
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=100)
