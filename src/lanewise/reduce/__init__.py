"""How the gradients of all lanes become one; owns every difference between the modes.

A new reducer is a name in `config/reducers.py`, with what is known of it, a file here, and a line in
`build.py`. `plan` takes its formula by what is known of it; one that needs other memory has its own in
`commands/plan/formulas.py`.
"""

from lanewise.reduce.blocks import find_blocks as find_blocks
from lanewise.reduce.build import build_reducer as build_reducer
from lanewise.reduce.build import require_plain as require_plain
from lanewise.reduce.reducer import LaneWork as LaneWork
from lanewise.reduce.reducer import Reducer as Reducer
from lanewise.reduce.reducer import evaluate_lanes as evaluate_lanes
from lanewise.reduce.reducer import forget_gradients as forget_gradients
from lanewise.reduce.reducer import kept_gradients as kept_gradients
