"""What ``glm-jax trace`` does."""

import argparse

from rich.console import Console

from glm_jax.observe.step_log import read_step_log
from glm_jax.observe.timeline import write_timeline
from glm_jax.observe.timeline_figure import picture
from glm_jax.observe.timeline_options import DEFAULT_OUTPUT
from glm_jax.observe.timeline_page import page
from glm_jax.observe.timeline_signals import signals_of
from glm_jax.observe.timeline_table import title_of


def run(options: argparse.Namespace) -> int:
    """Read a log and write what is asked for.

    Raises:
        ValueError: The file is no step log, or nothing in it can be drawn.
        OSError: A file cannot be read or written.
        ImportError: matplotlib is needed and not installed.
    """
    log = read_step_log(options.log)
    console, written = Console(soft_wrap=True, highlight=False), []
    drawn = options.html is not None or options.png is not None
    output = options.output or (None if drawn else DEFAULT_OUTPUT)
    if output is not None:
        write_timeline(log, output)
        written.append(output)
    if drawn:
        signals, device = signals_of(log), log.header.device
        if options.png is not None:
            options.png.write_bytes(picture(signals, title_of(signals, device)))
            written.append(options.png)
        if options.html is not None:
            options.html.write_text(page(signals, device=device), encoding="utf-8")
            written.append(options.html)
    for path in written:
        console.print(f"written: {path}", markup=False)
    return 0
