"""`python -m lanewise.jobs FILE`: a worker that `lanewise.jobs.start` started."""

import sys
from pathlib import Path

from lanewise.jobs.signals import watch_as_worker
from lanewise.jobs.start import work

watch_as_worker()
work(Path(sys.argv[1]))
