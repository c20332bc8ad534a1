"""`ravnest-broker`: the command line of a broker."""

import asyncio
import contextlib
import logging
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import structlog

from ravnest_fed.commands.ending import call_when_input_closes
from ravnest_fed.commands.failing import failing_cleanly
from ravnest_fed.errors import UsageError
from ravnest_fed.links import PREFIX

LOCAL_FILE = "broker.toml"


@click.group()
@click.version_option(package_name="ravnest-fed")
def cli() -> None:
    """Run a broker on this host."""


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--bind-clients", help="Address to listen on for clients, such as tcp://*:7700.")
@click.option("--bind-brokers", help="Address to listen on for the other brokers, such as tcp://*:7701.")
@click.option("--log-format", type=click.Choice(["console", "json"]), default="console", show_default=True)
@click.option("--until-input-closes", is_flag=True, hidden=True, help="End when standard input closes.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@failing_cleanly
def run(
    folder: Path,
    bind_clients: str | None,
    bind_brokers: str | None,
    log_format: str,
    until_input_closes: bool,
    debug: bool,
) -> None:
    """Run the broker of FOLDER, one of the folders that `ravnest-fed init` made, until it is told to stop.

    Ctrl-C or SIGTERM drains it: its clients are sent to other brokers, and it ends once others hold what they handed in. A
    second one ends it at once.
    """
    from brokers.server import BrokerServer

    log = _log(log_format)
    if not folder.is_dir():
        raise UsageError(f"there is no directory {folder}", "name a broker's folder that `ravnest-fed init` made")
    binds = _binds(folder)
    server = BrokerServer(
        folder, bind_clients or binds.get("bind_clients", ""), bind_brokers or binds.get("bind_brokers", ""), log
    )
    asyncio.run(_until_told(server, until_input_closes))


async def _until_told(server: Any, until_input_closes: bool) -> None:
    task = asyncio.ensure_future(server.run())
    loop = asyncio.get_running_loop()
    asked = iter((server.drain,))

    def stop() -> None:
        """The first signal drains; a second one ends at once."""
        next(asked, task.cancel)()

    for number in (signal.SIGTERM, signal.SIGINT):
        # Windows has no such handlers; there Ctrl-C cancels the main task by itself.
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop)
    if until_input_closes:
        call_when_input_closes(task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    server.log.info("broker stopped", broker=server.entry.name)


def _binds(folder: Path) -> dict[str, str]:
    try:
        return tomllib.loads((folder / LOCAL_FILE).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder / LOCAL_FILE} cannot be read ({error})", "copy the whole broker folder, or give --bind-clients"
        ) from None


def _log(log_format: str) -> Any:
    renderer: Any = structlog.processors.JSONRenderer()
    if log_format == "console":
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            _without_secrets,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    return structlog.get_logger()


def _without_secrets(logger: Any, name: str, event: Any) -> Any:
    """A link holds a secret, so none may reach a log, whatever a peer sends us to repeat."""
    return {key: "[a link]" if PREFIX in str(value) else value for key, value in event.items()}


def main() -> None:
    """Entry point of the console command."""
    cli(prog_name="ravnest-broker")


if __name__ == "__main__":
    main()
