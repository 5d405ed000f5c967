"""`python -m lanewise.jobs FILE`: a worker that `lanewise.jobs.start` started."""

import sys
from pathlib import Path

from lanewise.jobs.rank import work
from lanewise.jobs.signals import watch_as_worker

watch_as_worker()
work(Path(sys.argv[1]))
