"""How requests are sent: a closed loop keeps N in flight, an open loop sends them at moments of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

T = TypeVar("T")
Send = Callable[[int], Awaitable[T]]  # takes the number of a request


async def closed_loop(send: Send[T], count: int, concurrency: int) -> list[T]:
    """Requests 0 … count-1 in order, the next one as soon as one of `concurrency` has ended."""
    answers: dict[int, T] = {}
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            answers[number] = await send(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, count)):
            group.create_task(work())
    return [answers[number] for number in range(count)]


async def open_loop(send: Send[T], count: int, rate: float, seed: str) -> list[T]:
    """Requests at the moments of a Poisson process of `rate` a second, however many are still unanswered.

    The same seed gives the same moments: those of a block are the same for all methods, and differ by block.
    """
    draw = Random(seed)
    loop = asyncio.get_running_loop()
    begin, due = loop.time(), 0.0
    tasks: list[asyncio.Task[T]] = []
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            await asyncio.sleep(max(0.0, begin + due - loop.time()))
            tasks.append(group.create_task(_as_coroutine(send, number)))
            due += draw.expovariate(rate)
    return [task.result() for task in tasks]


async def _as_coroutine(send: Send[T], number: int) -> T:
    return await send(number)
