"""Jsonnet, which is a program: evaluated in a process of its own, for some seconds and in so much memory."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from lanewise.errors import ConfigError

_MAX_SECONDS = 10
_MAX_BYTES = 2**30
# -I and -S: nothing is imported from the working directory or the environment but the one extension module.
_PROGRAM = f"""
import resource, sys
for limit, value in (resource.RLIMIT_AS, {_MAX_BYTES}), (resource.RLIMIT_CPU, {_MAX_SECONDS}):
    resource.setrlimit(limit, (value, value))
sys.path.append(sys.argv[1])
import _jsonnet
try:
    text = _jsonnet.evaluate_snippet(sys.argv[2], sys.stdin.buffer.read().decode())
except (RuntimeError, ValueError) as error:
    sys.exit(str(error))
sys.stdout.buffer.write(text.encode())
"""


def evaluate_jsonnet(text: str, source: str) -> str:
    """Evaluate a Jsonnet program to JSON.

    Args:
        text: the program.
        source: its path, for mistakes and for its imports.

    Raises:
        ConfigError: it has a mistake, does not end, or the package that reads it is missing.
    """
    module = find_spec("_jsonnet")
    if module is None or module.origin is None:
        raise ConfigError(
            f"{source} needs the jsonnet package, which is missing. Run: pip install lanewise[jsonnet]"
        )
    command = [sys.executable, "-IS", "-c", _PROGRAM, str(Path(module.origin).parent), source]
    try:
        done = subprocess.run(
            command, input=text.encode(), capture_output=True, timeout=_MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{source} was not evaluated within {_MAX_SECONDS} s. Look for an endless recursion in it."
        ) from error
    said = " ".join(done.stderr.decode(errors="replace").split())
    if done.returncode < 0:
        raise ConfigError(
            f"{source} cannot be evaluated in {_MAX_SECONDS} s and {_MAX_BYTES // 2**20} MiB: signal "
            f"{-done.returncode} ended it. Make it smaller. {said}"
        )
    if done.returncode > 0:
        raise ConfigError(f"{source} is not valid Jsonnet: {said}.")
    return done.stdout.decode()
