"""Saves checkpoints while training goes on, and reads them again.

The loop waits for a copy into memory, which a thread writes.
"""

import hashlib
import json
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, final

import torch
from safetensors import safe_open

from lanewise.errors import LanewiseError, StorageError
from lanewise.processes.watch.heartbeat import SAVE, heartbeat
from lanewise.processes.watch.watch import SAVING
from lanewise.processes.world.digests import require_digests
from lanewise.processes.world.encode import TensorTable, decode, encode
from lanewise.processes.world.world import World
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import FileEntry, Manifest, sync_folder, write_json
from lanewise.runs.checkpoint.part import Staging, part_name, share_out
from lanewise.runs.file import read_json, reading, reason, require_same, writing

logger = logging.getLogger(__name__)

STATE = "state.json"
MAX_STATE_BYTES = 100 * 2**20
"""The limit of safetensors for the names of tensors in one file."""
_SECONDS_FOR_A_PART = 1800.0


@final
class Saver:
    """Writes a checkpoint of all processes in the background, one at a time.

    Every process writes its part; then rank 0 writes the rest, publishes the checkpoint and removes older
    ones. The threads issue no collective: they report over the world's store. If a save fails, every process
    removes its files.

    Collective: every rank must construct it.

    Args:
        folder: where the checkpoints are, on a file system that all ranks share.
        world: the processes.
        keep_last: how many of the newest checkpoints to keep.
        keep_best: how many to keep of those with the best metric.
        sign: 1 if more of the metric is better, -1 if less is.
    """

    def __init__(
        self, folder: CheckpointFolder, world: World, *, keep_last: int, keep_best: int, sign: int
    ) -> None:
        self._folder = folder
        with writing(folder.path):
            folder.path.parent.mkdir(parents=True, exist_ok=True)
            self._inode = folder.path.parent.stat().st_ino
        self._world = world
        self._keep = {"keep_last": keep_last, "keep_best": keep_best, "sign": sign}
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        """What made the last save fail; `finish` raises it."""
        # Drawn by rank 0, so that the files of a killed process are not mistaken for those of this one.
        self._number = 0
        self._token: str = world.all_gather_tree(os.urandom(4).hex())[0]

    def save(self, state: Mapping[str, Any], manifest: Manifest) -> None:
        """Copy the state, and begin to write it; waits for the previous save to end.

        Every rank must call this for the same step.

        Args:
            state: equal on every rank, but for sharded and held tensors; tensors, and what `encode` takes.
                May change afterwards.
            manifest: without files; a metric that is not finite is kept as none.

        Raises:
            CheckpointError: if the state cannot be saved.
            StorageError: if the previous save failed.
        """
        self.finish()
        if manifest.metric is not None and not math.isfinite(manifest.metric):
            manifest = replace(manifest, metric=None)
        tensors = TensorTable()
        tree = {name: encode(value, name, tensors) for name, value in state.items()}
        shared = {name: tensor.nbytes for name, tensor in tensors.items() if name not in tensors.held}
        written = [*share_out(shared, self._world.world_size)[self._world.rank], *tensors.held]
        self._shared = hashlib.sha256(json.dumps(sorted(shared.items())).encode()).hexdigest()
        self._number += 1
        self._staging.take({name: tensors[name] for name in written})
        self._thread = threading.Thread(target=self._write, args=(tree, manifest), name=SAVING, daemon=True)
        self._thread.start()

    def finish(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the last save is written.

        Returns:
            Whether it was written in time.

        Raises:
            StorageError: if it failed.
        """
        if self._thread is not None:
            before, heartbeat.note = heartbeat.note, (SAVE, heartbeat.step, None)  # others may be lost
            self._thread.join(timeout_seconds)
            heartbeat.note = before
            if self._thread.is_alive():
                return False
            self._thread = None
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return True

    def _write(self, tree: Any, manifest: Manifest) -> None:
        """Write this process's part, and on rank 0 the rest; every rank learns how it ended."""
        temporary = self._folder.temporary(manifest.step, f"{self._token}x{self._number}")
        key = f"checkpoint/{self._token}/{self._number}"  # of this saver alone, as a world may have several
        error: BaseException | None = None
        try:
            require_same(self._inode, self._folder.path.parent)
            temporary.mkdir(parents=True, exist_ok=True)
            told = asdict(self._staging.write(temporary / part_name(self._world.rank)))
            told["shared"] = self._shared
        except Exception as caught:  # noqa: BLE001 - told to all ranks, and raised where the loop looks
            error, told = caught, {"error": _reason(caught, temporary)}
        try:
            self._world.tell(key, json.dumps(told))
            if self._world.rank == 0:
                why = self._publish(key, tree, manifest, temporary)
                self._world.tell(f"{key}/outcome", why)
            else:
                why = self._world.hear(f"{key}/outcome", [0], _SECONDS_FOR_A_PART)[0]
        except Exception as caught:  # noqa: BLE001 - the store or a rank is gone
            error, why = caught, _reason(caught, temporary)
        if why:
            shutil.rmtree(temporary, ignore_errors=True)  # otherwise a full disk would stay full
            self.failure = StorageError(
                f"the checkpoint of step {manifest.step} could not be written: {why}. "
                "Earlier checkpoints are as they were."
            )
            self.failure.__cause__ = error

    def _publish(self, key: str, tree: Any, manifest: Manifest, temporary: Path) -> str:
        """Complete a checkpoint of the parts of all ranks, publish and verify it, and remove older ones.

        Returns:
            What went wrong; empty if nothing did.
        """
        start = time.monotonic()
        try:
            texts = self._world.hear(key, range(self._world.world_size), _SECONDS_FOR_A_PART)
            told = [json.loads(text) for text in texts]
            if errors := [part["error"] for part in told if "error" in part]:
                return str(errors[0])
            if len({part.pop("shared") for part in told}) > 1:
                return "the processes hold other tensors, of which each writes some"
            state = write_json(temporary / STATE, json.dumps(tree, allow_nan=False), MAX_STATE_BYTES)
            manifest = replace(manifest, files=(*(FileEntry(**entry) for entry in told), state))
            manifest.write(temporary)
            sync_folder(temporary)
            self._folder.publish(temporary, manifest.step)
            sync_folder(self._folder.path.parent)
            manifest.verify(self._folder.of_step(manifest.step))
            self._folder.prune(manifest.step, **self._keep)
        except Exception as caught:  # noqa: BLE001 - told to all ranks
            return _reason(caught, temporary)
        seconds = time.monotonic() - start
        text = "checkpoint of step %d: published after %.1f s"
        logger.info(text, manifest.step, seconds, extra={"is_for_file_only": True})
        return ""


def _reason(error: BaseException, folder: Path) -> str:
    """Say why a save failed."""
    if isinstance(error, OSError):
        path = Path(error.filename or folder)
        return f"{reason(error, path)} ({path})"
    return str(error) if isinstance(error, LanewiseError) else repr(error)


def load_state(folder: Path, manifest: Manifest, device: str = "cpu") -> dict[str, Any]:
    """Return the state that was saved, with its tensors on a device; on `meta` without their values.

    Args:
        folder: of the checkpoint.
        manifest: its manifest, which was verified.
        device: of the tensors.

    Raises:
        CheckpointError: if a file cannot be read after all, or holds something that no save writes, or a
            tensor is not what the devices held that saved it.
    """
    with reading(folder):
        tensors: dict[str, torch.Tensor] = {}
        for entry in manifest.files:
            if entry.name == STATE:
                continue
            with safe_open(folder / entry.name, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if name in tensors:
                        raise ValueError(f"{entry.name} holds a tensor that another file holds too")
                    tensors[name] = file.get_tensor(name).to(device, copy=True)  # the file may be removed
        state = decode(read_json(folder / STATE, MAX_STATE_BYTES), tensors)
        if not isinstance(state, dict):
            raise TypeError(f"{STATE} is not a mapping")
    if manifest.digests and device != "meta":
        require_digests(state, manifest.digests, folder)
    return state
