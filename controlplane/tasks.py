"""Coroutines that run side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def until_first(*works: Coroutine[Any, Any, object]) -> None:
    """Run coroutines until one ends; then cancel the others. Raise the error of the one that ended."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done() and not task.cancelled():  # grpc.aio cancels what waits on a closed channel
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
