"""A client whose lines have a heartbeat of the test's choice: LINK RECIPE STATE INTERVAL TIMEOUT, in milliseconds."""

import asyncio
import sys
from pathlib import Path

from clients.effects import Tell
from clients.runner import ClientRunner
from ravnest_fed.commands.ending import call_when_input_closes
from ravnest_fed.links import parse_link
from ravnest_fed.recipe import load_recipe


def show(told: Tell) -> None:
    """Print what the client says, as its command does."""
    print(told.event, *(f"{name}={value}" for name, value in told.fields.items()), sep="  ", flush=True)


async def take_part(link: str, recipe: str, state: str, interval: str, timeout: str) -> None:
    """Run one client to its end, or to the end of what started it."""
    runner = ClientRunner(
        parse_link(Path(link).read_text()),
        load_recipe(Path(recipe)),
        show,
        Path(state),
        "cpu",
        (int(interval), int(timeout)),
    )
    call_when_input_closes(runner.leave)
    reason = await runner.run()
    print(f"done: {reason}; {runner.session.contributions} contributions counted")


if __name__ == "__main__":
    asyncio.run(take_part(*sys.argv[1:]))
