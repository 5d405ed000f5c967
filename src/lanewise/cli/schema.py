"""`lanewise schema`."""

import json

from lanewise.cli.arguments import Arguments, Command
from lanewise.config import RunConfig
from lanewise.config.schema import EDITOR_LINE, SCHEMA_FILE, json_schema


def schema(_: Arguments) -> int:
    """Print the JSON schema of a configuration."""
    print(write_schema(), end="")
    return 0


def write_schema() -> str:
    """Return the JSON schema of a configuration as text."""
    return json.dumps(json_schema(RunConfig), indent=1) + "\n"


COMMAND = Command(
    name="schema",
    text=f"""\
Prints the JSON schema of a configuration, by which editors complete and check it while it is written. Most
know it in a YAML file by its first line:

  lanewise schema > {SCHEMA_FILE}
  {EDITOR_LINE.rstrip()}""",
    run=schema,
)
