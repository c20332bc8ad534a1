"""After a majority of brokers is lost for ever: a new federation that goes on from the best ledger that is left.

It is a fork, and says so: its file names the federation and the round that it comes from, its brokers have new keys, and
nothing that was signed for the old one counts in it. Needs torch, for the model's own dtypes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from ravnest_fed.errors import UsageError
from ravnest_fed.federation import INITIAL_MODEL, Federation, to_tables
from ravnest_fed.founding import Address, Founded, require_distinct, require_empty, write_folder
from ravnest_fed.identity import Identity
from ravnest_fed.links import parse_link
from ravnest_fed.model_files import read_model
from ravnest_fed.replica import model_hash
from ravnest_fed.verification import furthest, prove


@dataclass(frozen=True)
class Recovered:
    """The fork, the round that its initial model is of, and the members that keep their keys."""

    founded: Founded
    server_round: int
    kept_members: int


def recover(folder: Path, addresses: Sequence[Address], out: Path) -> Recovered:
    """Make a fork in `out` from the furthest ledger in `folder`, which is proven first.

    `addresses` are those of the new brokers; none: those of the old ones. Settings stay; rounds count from 1 again; the
    outer optimiser begins anew. Members keep their keys where their links lie in `folder`, and get new ones otherwise.
    Raises VerificationError, LedgerError or UsageError.
    """
    import safetensors.torch

    from ravnest_fed.model_state import export_state_dict

    require_empty(out)
    source = furthest(folder)
    replica = prove(source).replica
    old = replica.federation
    addresses = list(addresses) or [_address_of(old, index) for index in range(len(old.brokers))]
    require_distinct(addresses)
    initial = safetensors.torch.load_file(source / INITIAL_MODEL)
    tensors = export_state_dict(replica.schema, replica.state, initial)
    model = safetensors.torch.save({name: one.contiguous() for name, one in tensors.items()})
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / INITIAL_MODEL
        file.write_bytes(model)
        state = read_model(file, old.schema)
    operator = Identity.generate()
    brokers = [Identity.generate() for _ in addresses]
    known = _members_in(folder)
    members = [known.get(entry.node_id) or Identity.generate() for entry in old.members]
    tables = to_tables(old)
    general = msgspec.structs.replace(
        old.federation,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model_hash=model_hash(old.schema, state).hex(),
        forked_from=f"{old.fingerprint.hex()} at round {replica.head.server_round}",
        topology="parameter-server" if len(addresses) == 1 else "butterfly",
    )
    tables["federation"] = msgspec.to_builtins(general)
    names = [entry.name for entry in old.members]
    founded = write_folder(tables, operator, brokers, addresses, list(zip(names, members, strict=True)), model, out)
    return Recovered(founded, replica.head.server_round, sum(entry.node_id in known for entry in old.members))


def _address_of(federation: Federation, index: int) -> Address:
    entry = federation.brokers[index]
    host, _, client_port = entry.client_address.removeprefix("tcp://").rpartition(":")
    peer_port = entry.peer_address.rpartition(":")[2]
    return Address.parse(f"{host}:{client_port}:{peer_port}")


def _members_in(folder: Path) -> dict[str, Identity]:
    """The members whose links the operator kept in `folder`, by node id."""
    found = {}
    for file in sorted((folder / "members").glob("*.link")):
        try:
            identity = Identity(parse_link(file.read_text()).seed)
        except (OSError, UsageError):
            continue
        found[identity.node_id] = identity
    return found
