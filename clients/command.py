"""`ravnest-client`: the command line of a client."""

import asyncio
import contextlib
import os
import signal
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import click
import psutil
from platformdirs import user_data_path
from rich.console import Console
from rich.markup import escape

from clients.amounts import parse_bytes, parse_rate, parse_share
from clients.effects import Tell
from clients.politeness import Manners, When, most_threads
from clients.probing import probe
from clients.uploads import MIN_RATE
from ravnest_fed.commands.ending import call_when_input_closes
from ravnest_fed.commands.failing import failing_cleanly
from ravnest_fed.errors import IdentityError, UsageError
from ravnest_fed.identity import Identity
from ravnest_fed.links import Link, parse_link

if TYPE_CHECKING:
    from clients.runner import ClientRunner


@click.group()
@click.version_option(package_name="ravnest-fed")
def cli() -> None:
    """Take part in a federation with this machine."""


@cli.command()
@click.argument("link")
@click.option(
    "--recipe", type=click.Path(path_type=Path), required=True, help="The federation's recipe: file or folder."
)
@click.option("--device", default="auto", show_default=True, help="A torch device, such as cpu, cuda:0 or mps.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads for training; torch's own choice by default.")
@click.option(
    "--when",
    default="idle",
    show_default=True,
    help="When to train: idle (the machine is not needed), always, or hours such as 22:00-06:30 (idle, and within them).",
)
@click.option("--max-gpu-memory", metavar="BYTES", help="Most GPU memory to take, such as 6GB; all by default.")
@click.option("--max-cpu", metavar="PERCENT", help="Most of the CPU to take, such as 50%; all by default.")
@click.option("--upload-limit", metavar="RATE", help="Fastest upload, such as 2MB/s; no limit by default.")
@click.option(
    "--state", type=click.Path(path_type=Path, file_okay=False), help="Where to keep what must survive a kill."
)
@click.option("--until-input-closes", is_flag=True, hidden=True, help="End when standard input closes.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@failing_cleanly
def join(
    link: str,
    recipe: Path,
    device: str,
    threads: int | None,
    when: str,
    max_gpu_memory: str | None,
    max_cpu: str | None,
    upload_limit: str | None,
    state: Path | None,
    until_input_closes: bool,
    debug: bool,
) -> None:
    """Join through LINK (or a file that holds it) and train until the federation ends.

    Ctrl-C finishes the round and then says goodbye; a second one drops the round. What was not handed in is kept, and
    offered again at the next start.

    While the machine is needed, training pauses between two steps, hands in what it has, and goes on by itself.
    """
    manners = _manners(when, max_gpu_memory, max_cpu, upload_limit)
    parsed = parse_link(_link_text(link))
    import torch

    from clients.devices import limit_gpu_memory
    from clients.runner import ClientRunner
    from ravnest_fed.recipe import load_recipe

    limit_gpu_memory(device, manners.max_gpu_memory)
    if manners.max_cpu is not None:
        most = most_threads(manners.max_cpu, psutil.cpu_count() or 1)
        threads = min(threads or torch.get_num_threads(), most)
    if threads:
        torch.set_num_threads(threads)
    console = Console(stderr=False, highlight=False, soft_wrap=True)
    runner = ClientRunner(
        parsed,
        load_recipe(recipe),
        lambda told: _show(console, told),
        state or _state_of(parsed),
        device,
        probes=state or user_data_path("ravnest-fed"),
        manners=manners,
    )
    reason = asyncio.run(_until_told(runner, until_input_closes))
    console.print(f"[bold]done[/bold]: {escape(reason)}; {runner.session.contributions} contributions counted")


cli.add_command(probe)


async def _until_told(runner: "ClientRunner", until_input_closes: bool) -> str:
    loop = asyncio.get_running_loop()
    # Windows has no such handlers; there Ctrl-C ends the process without a goodbye.
    with contextlib.suppress(NotImplementedError):
        loop.add_signal_handler(signal.SIGINT, runner.leave, True)
        loop.add_signal_handler(signal.SIGTERM, runner.leave)
    if until_input_closes:
        call_when_input_closes(runner.leave)
    return await runner.run()


def _manners(when: str, max_gpu_memory: str | None, max_cpu: str | None, upload_limit: str | None) -> Manners:
    rate = parse_rate(upload_limit, "--upload-limit") if upload_limit else None
    if rate is not None and rate < MIN_RATE:
        raise UsageError(
            f"--upload-limit is {upload_limit}, so slow that brokers would give uploads up",
            f"use {MIN_RATE // 1000}KB/s or more",
        )
    return Manners(
        When.parse(when),
        parse_bytes(max_gpu_memory, "--max-gpu-memory") if max_gpu_memory else None,
        parse_share(max_cpu, "--max-cpu") if max_cpu else None,
        rate,
    )


def _state_of(link: Link) -> Path:
    """A directory of this user's for this member of this federation."""
    member = Identity(link.seed).node_id
    return user_data_path("ravnest-fed") / f"{link.fingerprint.hex()[:16]}-{member[:16]}"


def _link_text(link: str) -> str:
    if link.startswith("ravnest://"):
        return link
    file = Path(link)
    try:
        if os.name == "posix" and stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise IdentityError(f"link file {file} can be read by others", f"run: chmod 600 {file}")
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        raise UsageError(f"{link[:60]!r} is neither a link nor a file with one", "paste the operator's line") from None


def _show(console: Console, told: Tell) -> None:
    # What a broker sent us to show must not be read as markup.
    fields = escape("  ".join(f"{name}={value}" for name, value in told.fields.items()))
    console.print(
        f"[yellow]{told.event}[/yellow]  {fields}" if told.warning else f"{told.event}  {fields}", markup=True
    )


def main() -> None:
    """Entry point of the console command."""
    cli(prog_name="ravnest-client")


if __name__ == "__main__":
    main()
