"""How a process that another one started learns that its starter is gone."""

import asyncio
import os
import sys
from collections.abc import Callable


def call_when_input_closes(action: Callable[[], object]) -> None:
    """On the running loop, call `action` once whoever holds the other end of standard input is gone."""
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def readable() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            action()

    loop.add_reader(descriptor, readable)
