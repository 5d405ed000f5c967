"""Prints docs/_static/schedules.svg, the schedules with a name: `python docs/write_schedules.py`."""

from lanewise.config import SchedulerConfig
from lanewise.engine.run.scheduler import named_factor

NUM_STEPS = 200
WIDTH, HEIGHT, MARGIN = 200, 90, 24
COLUMNS = 3
DRAWN = {
    "linear": SchedulerConfig(name="linear", warmup=0.1),
    "cosine": SchedulerConfig(name="cosine", warmup=0.1),
    "wsd": SchedulerConfig(name="wsd", warmup=0.1),
    "cosine, min_lr_factor: 0.1": SchedulerConfig(name="cosine", warmup=0.1, min_lr_factor=0.1),
    "wsd, decay: 0.4, min_lr_factor: 0.1": SchedulerConfig(
        name="wsd", warmup=0.1, decay=0.4, min_lr_factor=0.1
    ),
    "cosine, num_cycles: 3": SchedulerConfig(name="cosine", warmup=0.1, num_cycles=3),
}


def main() -> str:
    """Return the picture: for each schedule the learning rate over the steps of a run."""
    rows = -(-len(DRAWN) // COLUMNS)
    width, height = COLUMNS * (WIDTH + MARGIN) + MARGIN, rows * (HEIGHT + 2 * MARGIN) + MARGIN
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    panels = "\n".join(panel(number, *drawn) for number, drawn in enumerate(DRAWN.items()))
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="system-ui, sans-serif" font-size="12">
<title>The learning rate over the steps of a run, by each scheduler with a name, after a warm-up</title>
<rect width="{width}" height="{height}" fill="#ffffff"/>
{panels}
</svg>
"""


def panel(number: int, title: str, section: SchedulerConfig) -> str:
    """Draw one schedule below its title."""
    left = MARGIN + number % COLUMNS * (WIDTH + MARGIN)
    top = 2 * MARGIN + number // COLUMNS * (HEIGHT + 2 * MARGIN)
    factor = named_factor(section, NUM_STEPS)
    points = " ".join(
        f"{left + WIDTH * step / NUM_STEPS:.1f},{top + HEIGHT * (1 - factor(step)):.1f}"
        for step in range(NUM_STEPS + 1)
    )
    return f"""\
<text x="{left}" y="{top - 8}" fill="#1b1f24">{title}</text>
<path d="M{left} {top}V{top + HEIGHT}H{left + WIDTH}" fill="none" stroke="#8c959f"/>
<polyline points="{points}" fill="none" stroke="#3b82f6" stroke-width="2"/>"""


if __name__ == "__main__":
    print(main(), end="")
