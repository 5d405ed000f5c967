"""Keeps the memory of tensors on a CPU from one step to the next."""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
_NEVER = 2**31 - 1
_LARGEST = 2**30
_OF_USERS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Let glibc's malloc keep what is freed, up to blocks of a GiB, for the whole process.

    By default it maps a large block anew each time and gives it back to the kernel, so that a large
    activation costs a page fault for each 4 KiB in every step. Does nothing with another libc, and where the
    environment tunes malloc already.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _OF_USERS):
        return
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    mallopt(_M_MMAP_THRESHOLD, _LARGEST)
