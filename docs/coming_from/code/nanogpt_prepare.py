"""Writes train.bin, val.bin and meta.json to data/chars, as nanoGPT's prepare.py does."""

import json
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

folder = Path("data/chars")
folder.mkdir(parents=True, exist_ok=True)
data = "\n".join(topics.values())[:100_000]  # documentation that Python carries: nothing is downloaded
chars = sorted(set(data))
stoi = {ch: i for i, ch in enumerate(chars)}
ids = np.array([stoi[ch] for ch in data], dtype=np.uint16)
n = int(len(ids) * 0.9)
ids[:n].tofile(folder / "train.bin")
ids[n:].tofile(folder / "val.bin")
(folder / "meta.json").write_text(json.dumps({"vocab_size": len(chars), "itos": chars}))
print(f"train has {n:,} tokens, val has {len(ids) - n:,}")
