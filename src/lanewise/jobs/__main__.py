"""`python -m lanewise.jobs FILE`: a worker that `lanewise.jobs.start` started."""

import sys
from pathlib import Path

from lanewise.jobs.signals import watch_as_worker
from lanewise.jobs.start import work
from lanewise.lifeline import die_with_parent

die_with_parent()
watch_as_worker()
work(Path(sys.argv[1]))
