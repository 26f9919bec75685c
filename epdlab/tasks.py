"""Work that runs to its end, even when whoever waits for it is cancelled. Nothing here knows what the work is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def to_the_end(work: Awaitable[T]) -> T:
    """The result of `work`. A cancellation goes on only once the work has ended: what it uses may go after that."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled and not task.cancelled():
        task.exception()
        raise asyncio.CancelledError
    return task.result()
