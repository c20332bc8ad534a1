"""`ravnest-fed status`: where each broker is and what it waits for."""

import asyncio
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ravnest_fed.commands.failing import failing_cleanly
from ravnest_fed.commands.options import debug_option, folder_argument
from ravnest_fed.commands.round_table import readable_bytes
from ravnest_fed.errors import BrokerUnreachable
from ravnest_fed.federation import FILE_NAME, Federation
from ravnest_fed.founding import OPERATOR_KEY
from ravnest_fed.identity import Identity
from ravnest_fed.messages import Status
from ravnest_fed.net.asking import Asker
from ravnest_fed.roster import load_changes, with_changes

ANSWER_SECONDS = 5.0


@click.command()
@folder_argument
@debug_option
@failing_cleanly
def status(folder: Path, debug: bool) -> None:
    """Ask every broker of the federation in FOLDER, with the operator's key that lies there."""
    federation = with_changes(Federation.load(folder / FILE_NAME), load_changes(folder))
    operator = Identity.load(folder / OPERATOR_KEY)
    answers = asyncio.run(_ask(federation, operator))
    forked = f", fork of {federation.federation.forked_from}" if federation.federation.forked_from else ""
    covered = max((answer.covered for answer in answers.values() if isinstance(answer, Status)), default=0)
    samples = federation.data.samples
    epochs = f", {covered / samples:.2f} epochs of {samples} shared samples" if samples else ""
    title = f"{federation.federation.name}, {len(federation.brokers)} brokers{epochs}{forked}"
    table = Table(title=title, title_justify="left")
    for column in ("broker", "round", "model", "clients", "sees", "memory", "disk free", "state"):
        table.add_column(column, justify="right" if column in ("round", "clients") else "left")
    for name, answer in answers.items():
        if isinstance(answer, str):
            table.add_row(name, "", "", "", "", "", "", f"[red]{escape(answer)}[/red]")
            continue
        live = sum(row.live for row in answer.clients)
        peers = ", ".join(federation.name_of(peer) for peer in answer.peers) or "nobody"
        state = f"ended: {answer.stop}" if answer.stop else answer.waiting
        sizes = (readable_bytes(answer.memory_bytes), readable_bytes(answer.disk_free_bytes))
        table.add_row(name, str(answer.server_round), answer.model_hash.hex()[:12], str(live), peers, *sizes, state)
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(table)
    if all(isinstance(answer, str) for answer in answers.values()):
        raise BrokerUnreachable("no broker answered", "check that the brokers run and that the addresses are right")


async def _ask(federation: Federation, operator: Identity) -> dict[str, Status | str]:
    async with Asker(federation, operator) as asker:
        return await asker.ask({}, ANSWER_SECONDS)
