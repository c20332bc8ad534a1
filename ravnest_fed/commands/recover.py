"""`ravnest-fed recover`: a fork of a federation whose majority of brokers is lost for ever."""

from pathlib import Path

import click

from ravnest_fed.commands.failing import failing_cleanly
from ravnest_fed.commands.options import debug_option, folder_argument


@click.command()
@folder_argument
@click.option(
    "--broker", "brokers", multiple=True, metavar="HOST:PORT", help="A broker of the fork. [those of the old one]"
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Where to make the fork.")
@debug_option
@failing_cleanly
def recover(folder: Path, brokers: tuple[str, ...], out: Path, debug: bool) -> None:
    """Make a new federation that goes on from the furthest ledger in FOLDER.

    For a majority of brokers that is lost for ever, and for nothing else: while a majority can come back, wait for it, or
    replace brokers one by one. Rounds that only the lost brokers knew are gone. Stop what is left of the old federation.
    """
    from ravnest_fed.founding import Address
    from ravnest_fed.recovering import recover as fork

    made = fork(folder, [Address.parse(text) for text in brokers], out)
    federation = made.founded.federation
    click.echo(f"made a fork in {out}, from {federation.federation.forked_from[:16]}… at round {made.server_round}")
    click.echo(
        f"fingerprint {federation.fingerprint.hex()[:32]}; rounds count from 1 again, the outer optimiser begins anew"
    )
    for own, entry in zip(made.founded.broker_folders, federation.brokers, strict=True):
        click.echo(f"copy {own} to the host of {entry.client_address} and run there: ravnest-broker run {own.name}")
    click.echo(f"send every member its new link from {out / 'members'}; {made.kept_members} of them keep their keys")
