"""`ravnest-fed verify`: replay ledgers and prove every signature and hash."""

from pathlib import Path

import click

from ravnest_fed.commands.failing import failing_cleanly
from ravnest_fed.commands.options import debug_option, folder_argument
from ravnest_fed.errors import LedgerError, VerificationError
from ravnest_fed.verification import ledgers_in, prove


@click.command()
@folder_argument
@debug_option
@failing_cleanly
def verify(folder: Path, debug: bool) -> None:
    """Replay every ledger in FOLDER and check each hash, vote and client signature.

    A replay begins with the initial model, or with the ledger's oldest checkpoint, whose state a majority signed.
    """
    found = ledgers_in(folder)
    if not found:
        raise LedgerError(f"there is no ledger in {folder}", "name the folder of a federation or broker that has run")
    reached: dict[int, tuple[str, bytes]] = {}
    for one in found:
        try:
            proven = prove(one.path)
        except VerificationError as error:
            raise VerificationError(f"{one.name}: {error.what}", error.remedy) from error
        head = proven.replica.head
        source = f"the checkpoint of round {proven.began}" if proven.began else "the initial model"
        name, known = reached.setdefault(head.server_round, (one.name, head.commit_hash))
        if known != head.commit_hash:
            raise VerificationError(f"{one.name} and {name} hold different commits at round {head.server_round}")
        proof = f"rounds {proven.began + 1} to {head.server_round} proven from {source}"
        click.echo(f"{one.name}: {proof}, model hash {head.model_hash.hex()}")
