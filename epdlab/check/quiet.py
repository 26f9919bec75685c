"""What a search needs of its Python process: no garbage collection at a moment of its own choosing, and no logs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Collect no garbage and log nothing of the hand-off meanwhile; within another `quiet`, nothing is left to do.

    Model memory goes back when its last reference goes. A collection would let go of some of it at a moment that
    differs from run to run, and the same moves would no longer give the same addresses.
    """
    if not gc.isenabled():
        yield
        return
    log = logging.getLogger("epdlab")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()
        log.setLevel(level)
