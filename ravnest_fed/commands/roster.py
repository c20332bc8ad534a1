"""`ravnest-fed roster`: brokers come, go and move, by changes that the operator signs and a round commits."""

import asyncio
import time
from pathlib import Path

import click
import tomli_w
from rich.console import Console
from rich.table import Table

from ravnest_fed.commands.failing import failing_cleanly
from ravnest_fed.commands.options import debug_option, folder_argument
from ravnest_fed.errors import BrokerUnreachable, RavnestError, UsageError
from ravnest_fed.facts import RosterChange, sign
from ravnest_fed.federation import FILE_NAME, INITIAL_MODEL, BrokerEntry, Federation
from ravnest_fed.founding import BROKER_FILE, BROKER_KEY, OPERATOR_KEY, Address
from ravnest_fed.identity import Identity, Signed
from ravnest_fed.messages import ChangeNotice, Status
from ravnest_fed.model_files import write_durably
from ravnest_fed.net.asking import Asker
from ravnest_fed.roster import finding, load_changes, save_changes, with_changes

ASK_SECONDS = 5.0
POLL_SECONDS = 1.0
wait_option = click.option(
    "--wait", type=click.FloatRange(0), default=600.0, show_default=True, help="Seconds to wait for the commit."
)


@click.group()
def roster() -> None:
    """Show or change the brokers of a running federation, one at a time.

    A change is signed with the operator's key, stands in the next round that is committed, and rules from the round after.
    """


@roster.command()
@folder_argument
@debug_option
@failing_cleanly
def show(folder: Path, debug: bool) -> None:
    """Show the roster in force, as the brokers tell it."""
    federation = _learn(folder, asyncio.run(_statuses(_known(folder), _operator(folder))))
    table = Table(title=f"{federation.federation.name}, majority {federation.majority} of {len(federation.brokers)}")
    for column in ("broker", "clients dial", "brokers dial", "key"):
        table.add_column(column, overflow="fold")
    for broker in federation.brokers:
        table.add_row(broker.name, broker.client_address, broker.peer_address, broker.node_id[:16])
    Console(highlight=False).print(table)


@roster.command()
@folder_argument
@click.argument("address", metavar="HOST:PORT")
@click.option("--name", help="What people call it. [the next bN]")
@wait_option
@debug_option
@failing_cleanly
def add(folder: Path, address: str, name: str | None, wait: float, debug: bool) -> None:
    """Add a broker with a new key, and make its folder in FOLDER/brokers."""
    federation = _learn(folder, asyncio.run(_statuses(_known(folder), _operator(folder))))
    place = Address.parse(address)
    name = name or _free_name(folder, federation)
    own = folder / "brokers" / name
    if own.exists():
        raise UsageError(f"{own} exists", "name the new broker otherwise, or move the folder away")
    identity = Identity.generate()
    entry = BrokerEntry(
        name=name,
        public_key=identity.public_key.hex(),
        curve_key=identity.curve_public.hex(),
        client_address=place.reach(place.client_port),
        peer_address=place.reach(place.peer_port),
    )
    signed = _change(folder, federation, "add", entry)
    own.mkdir(parents=True, mode=0o700)
    for file in (FILE_NAME, INITIAL_MODEL):
        write_durably(own / file, (folder / file).read_bytes())
    identity.save(own / BROKER_KEY)
    binds = {"bind_clients": place.bind(place.client_port), "bind_brokers": place.bind(place.peer_port)}
    write_durably(own / BROKER_FILE, tomli_w.dumps(binds).encode())
    save_changes(own, [*load_changes(folder), signed])
    click.echo(f"copy {own} to {place.host} and run there: ravnest-broker run {own.name}")
    _commit(folder, federation, signed, wait)


@roster.command()
@folder_argument
@click.argument("name")
@wait_option
@debug_option
@failing_cleanly
def remove(folder: Path, name: str, wait: float, debug: bool) -> None:
    """Remove a broker: one that shall go, or one whose disk is lost and which comes back under a new key."""
    federation = _learn(folder, asyncio.run(_statuses(_known(folder), _operator(folder))))
    _commit(folder, federation, _change(folder, federation, "remove", _entry(federation, name)), wait)
    left = len(federation.brokers) - 1
    if left < 3:
        click.echo(f"note: {left} broker{'s tolerate' if left > 1 else ' tolerates'} no loss; add one", err=True)


@roster.command()
@folder_argument
@click.argument("name")
@click.argument("address", metavar="HOST:PORT")
@wait_option
@debug_option
@failing_cleanly
def readdress(folder: Path, name: str, address: str, wait: float, debug: bool) -> None:
    """Tell everybody that a broker, with its key, ledger and name, is reached at another address."""
    federation = _learn(folder, asyncio.run(_statuses(_known(folder), _operator(folder))))
    known, place = _entry(federation, name), Address.parse(address)
    entry = BrokerEntry(
        name=name,
        public_key=known.public_key,
        curve_key=known.curve_key,
        client_address=place.reach(place.client_port),
        peer_address=place.reach(place.peer_port),
    )
    _commit(folder, federation, _change(folder, federation, "readdress", entry), wait)
    click.echo(f"let {name} listen there: bind_clients and bind_brokers in its {BROKER_FILE}")


def _known(folder: Path) -> Federation:
    return with_changes(Federation.load(folder / FILE_NAME), load_changes(folder))


def _operator(folder: Path) -> Identity:
    return Identity.load(folder / OPERATOR_KEY)


def _entry(federation: Federation, name: str) -> BrokerEntry:
    for broker in federation.brokers:
        if broker.name == name:
            return broker
    names = ", ".join(broker.name for broker in federation.brokers)
    raise UsageError(f"there is no broker {name}", f"the roster is {names}")


def _free_name(folder: Path, federation: Federation) -> str:
    taken = {broker.name for broker in (*federation.brokers, *federation.founding.brokers)}
    number = 1
    while f"b{number}" in taken or (folder / "brokers" / f"b{number}").exists():
        number += 1
    return f"b{number}"


async def _statuses(federation: Federation, operator: Identity) -> dict[str, Status | str]:
    async with Asker(federation, operator) as asker:
        return await asker.ask({}, ASK_SECONDS)


def _learn(folder: Path, answers: dict[str, Status | str]) -> Federation:
    """The federation with the roster that is furthest among the answers, which is kept in `folder`."""
    told = [[signed for _, signed in one.changes] for one in answers.values() if isinstance(one, Status)]
    if not told:
        raise BrokerUnreachable("no broker answered", "check that the brokers run and that the addresses are right")
    furthest = max(told, key=len)
    federation = with_changes(Federation.load(folder / FILE_NAME), furthest)
    if len(furthest) >= len(load_changes(folder)):
        save_changes(folder, furthest)
    return federation


def _change(folder: Path, federation: Federation, action: str, entry: BrokerEntry) -> Signed:
    made = len(load_changes(folder))
    change = RosterChange(
        federation.fingerprint,
        made + 1,
        action,
        entry.name,
        entry.public_key,
        entry.curve_key,
        entry.client_address,
        entry.peer_address,
    )
    signed = sign(_operator(folder), change)
    if wrong := finding(federation, federation.brokers, made, signed):
        raise UsageError(f"the roster cannot be changed so: {wrong}", "see `ravnest-fed roster show`")
    return signed


def _commit(folder: Path, federation: Federation, signed: Signed, wait: float) -> None:
    """Tell every broker the change until one has it in a commit."""
    server_round = asyncio.run(_committed(federation, _operator(folder), signed, wait))
    if server_round is None:
        raise RavnestError(
            f"the change was told to the brokers, but no round committed it within {wait:g} s",
            "rounds need contributions: see `ravnest-fed status`; give the same command again to go on waiting",
        )
    changes = [*load_changes(folder), signed]
    save_changes(folder, changes)
    click.echo(f"committed in round {server_round}, in force from round {server_round + 1}")


async def _committed(federation: Federation, operator: Identity, signed: Signed, wait: float) -> int | None:
    deadline = time.monotonic() + wait
    async with Asker(federation, operator) as asker:
        while True:
            answers = await asker.ask({}, ASK_SECONDS)
            for answer in answers.values():
                for server_round, made in answer.changes if isinstance(answer, Status) else ():
                    if made == signed:
                        return server_round
            if time.monotonic() >= deadline:
                return None
            asker.tell(ChangeNotice(signed))
            await asyncio.sleep(POLL_SECONDS)
