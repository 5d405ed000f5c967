"""`python -m lanewise.commands.jobs FILE`: a worker that `lanewise.commands.jobs.start` started."""

import sys
from pathlib import Path

from lanewise.commands.jobs.rank import work
from lanewise.commands.jobs.signals import watch_as_worker

watch_as_worker()
work(Path(sys.argv[1]))
