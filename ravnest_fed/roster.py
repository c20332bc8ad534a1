"""Changes of the roster: operator-signed, one broker at a time, each committed in a round and in force from the next one.

Between two rounds at most one broker comes or goes, so any majority before and any after have a broker in common, and each
round has one roster that its votes are counted against. Source: Lamport, Malkhi and Zhou, "Reconfiguring a state machine"
(2010).
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from ravnest_fed.errors import LedgerError, RemoteProtocolError, VerificationError
from ravnest_fed.facts import RosterChange, decode, encode, open_signed
from ravnest_fed.federation import BrokerEntry, Federation
from ravnest_fed.head import Head, roster_after
from ravnest_fed.identity import Signed
from ravnest_fed.model_files import write_durably

CHANGES_FILE = "roster.changes"
MAX_BROKERS = 64
Changes = Sequence[tuple[int, Signed]]
"""Committed changes in order: the round that each stands in, and what the operator signed."""


def opened(federation: Federation, signed: Signed) -> RosterChange | None:
    """The change that the federation's operator signed; None if it is not one."""
    change = open_signed(RosterChange, signed, bytes.fromhex(federation.operator.public_key))
    return change if change is not None and change.federation == federation.fingerprint else None


def finding(federation: Federation, brokers: Sequence[BrokerEntry], made: int, signed: Signed) -> str:
    """What is wrong with `signed` as the next change of `brokers` after `made` others; empty if nothing is."""
    change = opened(federation, signed)
    if change is None:
        return "it is not signed by this federation's operator"
    if change.number != made + 1:
        return f"it is change {change.number}, and {made} were committed"
    by_name = {one.name: one for one in brokers}
    known = by_name.get(change.name)
    try:
        keys = [bytes.fromhex(change.public_key), bytes.fromhex(change.curve_key)]
    except ValueError:
        return "its keys are not hexadecimal"
    if any(len(key) != 32 for key in keys) or not 1 <= len(change.name) <= 64:
        return "its name or keys have an impossible length"
    others = [one for one in brokers if one.name != change.name]
    if change.action == "add":
        if known is not None:
            return f"there is a broker {change.name} already"
        if len(brokers) >= MAX_BROKERS:
            return f"there are {MAX_BROKERS} brokers already"
    elif change.action in ("remove", "readdress"):
        if known is None:
            return f"there is no broker {change.name}"
        if (known.public_key, known.curve_key) != (change.public_key, change.curve_key):
            return f"broker {change.name} has other keys"
        if change.action == "remove":
            return "" if others else "it is the last broker"
    else:
        return f"there is no action {change.action!r}"
    for one in others:
        if {one.public_key, one.curve_key} & {change.public_key, change.curve_key}:
            return f"broker {one.name} has the same key"
        if {one.client_address, one.peer_address} & {change.client_address, change.peer_address}:
            return f"broker {one.name} has the same address"
    return ""


def change_finding(federation: Federation, head: Head, signed: Signed) -> str:
    """What is wrong with `signed` as the change of the round after `head`; empty if nothing is."""
    return finding(federation, head.brokers, len(head.changes), signed)


def roster_for(federation: Federation, changes: Changes, server_round: int) -> Federation:
    """`federation` with the roster whose votes count in `server_round`: that of the founding, and the changes before it.

    Raises VerificationError, naming the change, if one is not the operator's or does not follow the others.
    """
    return with_changes(federation, [signed for at, signed in changes if at < server_round])


def with_changes(federation: Federation, changes: Iterable[Signed]) -> Federation:
    """`federation` with the roster after `changes`. Raises VerificationError."""
    founding = federation.founding
    brokers = founding.brokers
    for made, signed in enumerate(changes):
        wrong = finding(founding, brokers, made, signed)
        change = opened(founding, signed)
        if wrong or change is None:
            raise VerificationError(f"change {made + 1} of the roster does not hold: {wrong}")
        brokers = roster_after(brokers, change)
    return founding.with_brokers(brokers)


def roster_with(head: Head, change: Signed | None) -> tuple[BrokerEntry, ...]:
    """The roster of the round after next, if the next one commits this change."""
    return roster_after(head.brokers, decode(RosterChange, change.payload)) if change is not None else head.brokers


def load_changes(folder: Path) -> list[Signed]:
    """The changes that a broker's or the operator's folder knows of. Raises LedgerError for a damaged file."""
    file = folder / CHANGES_FILE
    try:
        return decode(list[Signed], file.read_bytes()) if file.exists() else []
    except (OSError, RemoteProtocolError) as error:
        raise LedgerError(f"{file} cannot be read: {error}", "copy it again from the operator's folder") from None


def save_changes(folder: Path, changes: Sequence[Signed]) -> None:
    """Keep the changes known, durably."""
    write_durably(folder / CHANGES_FILE, encode(list(changes)))
