"""Builds the emulated device, once for each machine, version of torch and text of its sources."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

FOLDER = Path(__file__).parent
NAME = "lanewise_emulated"
_SOURCES = ("module.cpp", "group.hpp", "kernels.hpp", "runtime.hpp")
_HEADERS = sysconfig.get_path("include")
_COMPILER = os.environ.get("CXX", "g++")


def why_not() -> str | None:
    """Say why the device cannot be built here; None if it can, or is built already."""
    if library().exists():
        return None
    if not shutil.which(_COMPILER):
        return f"the emulated device needs a C++ compiler to be built: there is no {_COMPILER}"
    if not Path(_HEADERS, "Python.h").exists():
        return f"the emulated device needs Python's headers to be built: there is no {_HEADERS}/Python.h"
    return None


def library() -> Path:
    """Return where the library is or will be."""
    text = b"".join((FOLDER / name).read_bytes() for name in _SOURCES)
    python = f"{sysconfig.get_platform()} {sysconfig.get_config_var('EXT_SUFFIX')}"
    key = hashlib.sha256(python.encode() + text).hexdigest()[:12]
    default = Path.home() / ".cache" / "lanewise-fake-device"
    cache = Path(os.environ.get("LANEWISE_FAKE_DEVICE_CACHE", default))
    return cache / f"{torch.__version__}-{key}" / f"{NAME}.so"


def build() -> Path:
    """Build the library unless it is there: half a minute of one core, and 1.5 GB of memory."""
    path = library()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():  # another process may have built it meanwhile
                _compile(path)
    return path


def _compile(path: Path) -> None:
    written = path.with_suffix(f".{os.getpid()}")
    include = [*cpp_extension.include_paths(), _HEADERS]
    libraries = Path(torch.__file__).parent / "lib"
    command = [
        *(_COMPILER, "-std=c++20", "-O0", "-fPIC", "-shared", "-w", "-o", str(written)),
        str(FOLDER / "module.cpp"),
        f"-DTORCH_EXTENSION_NAME={NAME}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        *(f"-isystem{folder}" for folder in include),
        *(f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the emulated device cannot be built:\n{done.stderr[:6000]}")
    written.rename(path)


if __name__ == "__main__":
    sys.stdout.write(f"{why_not() or build()}\n")
