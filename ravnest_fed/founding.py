"""Founding a federation: from a recipe and broker addresses to a signed file, keys, links and the initial model.

Needs torch, for the recipe's model.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from ravnest_fed.errors import SchemaMismatch, UsageError
from ravnest_fed.federation import FILE_NAME, INITIAL_MODEL, Federation, from_tables, with_settings
from ravnest_fed.federation_checks import FORMAT
from ravnest_fed.identity import Identity
from ravnest_fed.links import link_for
from ravnest_fed.model_files import write_durably
from ravnest_fed.parameters import default_shard_size, padded
from ravnest_fed.recipe import LoadedRecipe
from ravnest_fed.replica import model_hash

OPERATOR_KEY = "operator.key"
BROKER_KEY = "broker.key"
BROKER_FILE = "broker.toml"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Address:
    """Where a broker is reached: `host:port`, with the brokers' port after a second colon or else the next one."""

    host: str
    client_port: int
    peer_port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read `host:port` or `host:port:port`; an IPv6 host stands in brackets. Raises UsageError."""
        host, _, ports = text.partition("]:") if text.startswith("[") else text.partition(":")
        host = f"{host}]" if text.startswith("[") else host
        try:
            numbers = [int(port) for port in ports.split(":")]
        except ValueError:
            numbers = []
        if not host or len(numbers) not in (1, 2) or not all(0 < port < 65536 for port in numbers):
            raise UsageError(f"{text!r} is no broker address", "write it like b1.example:7700")
        peer = numbers[1] if len(numbers) == 2 else numbers[0] + 1
        if peer == numbers[0] or peer > 65535:
            raise UsageError(
                f"{text!r} leaves no port for the brokers' own traffic", "write it like b1.example:7700:7701"
            )
        return cls(host, numbers[0], peer)

    def reach(self, port: int) -> str:
        """The address that others dial."""
        return f"tcp://{self.host}:{port}"

    def bind(self, port: int) -> str:
        """The address that the broker listens on: every interface, or loopback alone."""
        return f"tcp://{self.host if self.host in LOOPBACK else '*'}:{port}"


@dataclass(frozen=True)
class Founded:
    """What founding made."""

    federation: Federation
    folder: Path
    broker_folders: tuple[Path, ...]
    link_files: tuple[Path, ...]


def found(
    loaded: LoadedRecipe,
    addresses: Sequence[Address],
    clients: int,
    settings: Mapping[str, str],
    weights: Path | None,
    folder: Path,
) -> Founded:
    """Make a federation in `folder`, which must not exist or be empty. Nothing is left behind if that fails.

    Raises UsageError, RecipeError, SchemaMismatch or FederationFileError.
    """
    require_distinct(addresses)
    require_empty(folder)
    existed = folder.exists()
    try:
        return _found(loaded, addresses, clients, settings, weights, folder)
    except BaseException:
        if folder.exists():
            shutil.rmtree(folder)
            if existed:
                folder.mkdir()
        raise


def require_empty(folder: Path) -> None:
    """Raise UsageError if something lies in `folder`."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty", "name a new directory with --out")


def require_distinct(addresses: Sequence[Address]) -> None:
    """Raise UsageError if two brokers would share an address."""
    seen: set[tuple[str, int]] = set()
    for address in addresses:
        for port in (address.client_port, address.peer_port):
            if (address.host, port) in seen:
                raise UsageError(
                    f"two brokers have the same address {address.host}:{port}",
                    "each broker needs two ports of its own, by default the one that is named and the next",
                )
            seen.add((address.host, port))


def _found(
    loaded: LoadedRecipe,
    addresses: Sequence[Address],
    clients: int,
    settings: Mapping[str, str],
    weights: Path | None,
    folder: Path,
) -> Founded:
    recipe = loaded.recipe
    tables: dict[str, Any] = {
        "federation": {
            "format": FORMAT,
            "name": loaded.name,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "seed": recipe.seed,
            "topology": "parameter-server" if len(addresses) == 1 else "butterfly",
            "recipe": loaded.name,
            "recipe_hash": loaded.hash,
        },
        "rounds": {
            "local_steps": recipe.local_steps,
            "micro_batch": recipe.micro_batch,
            "accumulation": recipe.accumulation,
            "min_contributions": 2 if clients > 1 else 1,
        },
    }
    with_settings(tables, settings)
    shard_size = tables.pop("schema", {}).get("shard_size")
    if loaded.shares_data:
        tables["data"] = {"samples": _samples(loaded)}
    model, schema, state = _initial(loaded, int(tables["federation"]["seed"]), weights, shard_size, len(addresses))
    operator = Identity.generate()
    brokers = [Identity.generate() for _ in addresses]
    members = [(f"c{number}", Identity.generate()) for number in range(1, clients + 1)]
    tables["federation"]["model_hash"] = model_hash(schema, state).hex()
    tables["schema"] = msgspec.to_builtins(schema)
    return write_folder(tables, operator, brokers, addresses, members, model, folder)


def _samples(loaded: LoadedRecipe) -> int:
    from clients.feed import shared_rows

    return shared_rows(loaded).length


def _initial(loaded: LoadedRecipe, seed: int, weights: Path | None, shard_size: int | None, brokers: int) -> Any:
    import safetensors.torch

    from ravnest_fed.model_state import initial_state_dict, read_state, schema_of

    model = loaded.build_model(seed)
    if weights is None:
        loaded.warm_start(model)
    else:
        try:
            model.load_state_dict(safetensors.torch.load_file(weights))
        except (OSError, RuntimeError, safetensors.SafetensorError) as error:
            raise SchemaMismatch(
                f"{weights} does not fit the recipe's model: {error}", "use weights of this model"
            ) from None
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    size = shard_size or default_shard_size(padded(count), brokers)
    schema = schema_of(model, size)
    schema.check()
    return safetensors.torch.save(initial_state_dict(model)), schema, read_state(model, schema)


def write_folder(
    tables: dict[str, Any],
    operator: Identity,
    brokers: Sequence[Identity],
    addresses: Sequence[Address],
    members: Sequence[tuple[str, Identity]],
    model: bytes,
    folder: Path,
) -> Founded:
    """Fill in who takes part in `tables`, sign the file, and write it with all keys, links and the initial model.

    `model` are the bytes of a safetensors file. Raises FederationFileError for tables that cannot work.
    """
    tables["operator"] = {"public_key": operator.public_key.hex(), "curve_key": operator.curve_public.hex()}
    tables["brokers"] = [
        {
            "name": f"b{number}",
            "public_key": identity.public_key.hex(),
            "curve_key": identity.curve_public.hex(),
            "client_address": address.reach(address.client_port),
            "peer_address": address.reach(address.peer_port),
        }
        for number, (identity, address) in enumerate(zip(brokers, addresses, strict=True), 1)
    ]
    tables["members"] = [
        {"name": name, "public_key": one.public_key.hex(), "curve_key": one.curve_public.hex()} for name, one in members
    ]
    federation = from_tables(tables, "the settings")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    text = federation.signed_by(operator).encode()
    write_durably(folder / FILE_NAME, text)
    write_durably(folder / INITIAL_MODEL, model)
    operator.save(folder / OPERATOR_KEY)
    broker_folders, link_files = [], []
    for entry, identity, address in zip(federation.brokers, brokers, addresses, strict=True):
        own = folder / "brokers" / entry.name
        own.mkdir(parents=True, mode=0o700)
        write_durably(own / FILE_NAME, text)
        write_durably(own / INITIAL_MODEL, model)
        identity.save(own / BROKER_KEY)
        binds = {
            "bind_clients": address.bind(address.client_port),
            "bind_brokers": address.bind(address.peer_port),
        }
        write_durably(own / BROKER_FILE, tomli_w.dumps(binds).encode())
        broker_folders.append(own)
    links = folder / "members"
    if members:
        links.mkdir(mode=0o700)
    for name, identity in members:
        file = links / f"{name}.link"
        file.touch(mode=0o600)
        file.write_text(link_for(federation, identity).text() + "\n")
        link_files.append(file)
    return Founded(federation, folder, tuple(broker_folders), tuple(link_files))
