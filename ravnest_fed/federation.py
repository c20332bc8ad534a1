"""The federation file: everything that all nodes of one training run must agree on, signed by its operator.

`federation.toml` is plain TOML that a person can read; its last table, `[signature]`, signs the bytes above it. The
fingerprint of those bytes names the federation everywhere: in links, handshakes, manifests and commits.
"""

import tomllib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import tomli_w

from ravnest_fed import codecs
from ravnest_fed.aggregation import outer
from ravnest_fed.errors import FederationFileError
from ravnest_fed.federation_checks import WARMUP_CODEC, check
from ravnest_fed.hashing import digest
from ravnest_fed.identity import Identity, Signed, node_id_of, verify
from ravnest_fed.parameters import Schema
from ravnest_fed.slices import Terms

FILE_NAME = "federation.toml"
INITIAL_MODEL = "model.safetensors"
MAX_FILE_BYTES = 16 * 2**20
MOST_STEPS_FACTOR = 16
"""Where rounds have a target time, the fastest client makes at most so many times `rounds.local_steps` by default."""
_SIGNATURE_HEADER = "\n[signature]\n"


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the file's tables."""


class General(_Table, frozen=True, kw_only=True):
    """What the federation is called and what it trains. Hashes are hex.

    `forked_from` names the federation and round whose model this one began with, after a majority was lost for ever.
    """

    format: int
    name: str
    created: str
    seed: int
    topology: Literal["butterfly", "parameter-server"] = "butterfly"
    recipe: str
    recipe_hash: str
    model_hash: str
    forked_from: str = ""


class Strategy(_Table, frozen=True, kw_only=True):
    """How contributions become an update. `clip_factor` times the running median norm bounds a contribution; 0: off.

    With `normalization` "fednova" the mean is over deltas a step, times the mean of the steps: who made more steps does
    not pull the model its way. Wang et al., "Tackling the objective inconsistency problem" (2020).

    `proximal` is FedProx's mu: how strongly local training is held to the base.
    """

    name: Literal["fedavg", "fedavgm", "scaffold", "fedadam", "fedyogi", "fedadagrad"] = "fedavg"
    learning_rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    beta2: float = outer.BETA2
    epsilon: float = outer.EPSILON
    normalization: Literal["fednova", "none"] = "fednova"
    weighting: Literal["auto", "examples", "equal"] = "auto"
    clip_factor: float = 4.0
    norm_history: int = 64
    max_weight: int = 65536
    proximal: float = 0.0


class Codecs(_Table, frozen=True, kw_only=True):
    """The codec of contributions (`up`) and of updates (`down`).

    In the first `warmup_rounds` rounds contributions travel in `WARMUP_CODEC`; None: as many as `up` asks for.
    """

    up: str = "int8"
    down: str = "int8"
    warmup_rounds: int | None = None


class Rounds(_Table, frozen=True, kw_only=True):
    """When a round closes and how much work a client does in it. Seconds are durations, never dates.

    A contribution may be based on a model up to `max_staleness` rounds before the newest. In the mode "asynchronous" a round
    closes with `target_contributions`, whoever they are by, and nobody is waited for (FedBuff; Nguyen et al., "Federated
    learning with buffered asynchronous aggregation" (2022)).

    With `grace_seconds` 0 the grace follows from how long recent rounds took, within its two bounds.
    With a `target_seconds` above 0 steps follow each client's speed, within `min_local_steps` and `max_local_steps` (0:
    `MOST_STEPS_FACTOR` times `local_steps`); else everybody makes `local_steps`.
    """

    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    max_staleness: int = 0
    target_contributions: int = 0
    min_contributions: int = 1
    grace_seconds: float = 0.0
    min_grace_seconds: float = 2.0
    max_grace_seconds: float = 300.0
    local_steps: int = 10
    micro_batch: int = 32
    accumulation: int = 1
    deadline_seconds: float = 3600.0
    target_seconds: float = 0.0
    min_local_steps: int = 1
    max_local_steps: int = 0

    @property
    def most_steps(self) -> int:
        """The most steps that an order may ask for."""
        if not self.target_seconds:
            return self.local_steps
        return self.max_local_steps or min(MOST_STEPS_FACTOR * self.local_steps, 2**31)


class Data(_Table, frozen=True, kw_only=True):
    """How many samples the data set has that all clients share; 0 where each has its own."""

    samples: int = 0


class Stop(_Table, frozen=True, kw_only=True):
    """When training ends, whichever comes first: after `rounds` (0: never), at a date, or once a metric is reached."""

    rounds: int = 0
    date: str = ""
    metric: str = ""
    at_least: float | None = None
    at_most: float | None = None


class Checkpoints(_Table, frozen=True, kw_only=True):
    """How often the log is folded into a checkpoint (rounds; 0: never), and how many of them stay, with the log from the
    oldest of them on."""

    checkpoint_every: int = 50
    keep: int = 2


class Limits(_Table, frozen=True, kw_only=True):
    """Bounds that admission enforces."""

    max_contributions: int = 1024
    max_metrics: int = 32


class BrokerEntry(_Table, frozen=True, kw_only=True):
    """One broker of the roster: its keys (hex) and the addresses that others reach it by."""

    name: str
    public_key: str
    curve_key: str
    client_address: str
    peer_address: str

    @property
    def node_id(self) -> str:
        """Fingerprint of the signing key."""
        return node_id_of(bytes.fromhex(self.public_key))


class MemberEntry(_Table, frozen=True, kw_only=True):
    """One client that may take part: its keys, hex."""

    name: str
    public_key: str
    curve_key: str

    @property
    def node_id(self) -> str:
        """Fingerprint of the signing key."""
        return node_id_of(bytes.fromhex(self.public_key))


class OperatorEntry(_Table, frozen=True, kw_only=True):
    """The operator's keys, hex: the one signs this file, the other may ask every broker for its status."""

    public_key: str
    curve_key: str


class _Signature(_Table, frozen=True, kw_only=True):
    value: str


class Federation(_Table, frozen=True, kw_only=True, dict=True):
    """The content of a federation file. Build with `Federation.load`, or fill it in and `save` it."""

    federation: General
    strategy: Strategy = Strategy()
    codecs: Codecs = Codecs()
    rounds: Rounds = Rounds()
    data: Data = Data()
    stop: Stop = Stop()
    limits: Limits = Limits()
    checkpoints: Checkpoints = Checkpoints()
    operator: OperatorEntry
    brokers: tuple[BrokerEntry, ...]
    members: tuple[MemberEntry, ...] = ()
    schema: Schema

    @cached_property
    def text(self) -> str:
        """The signed part of the file."""
        return tomli_w.dumps(to_tables(self))

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that name this federation."""
        return digest("federation", self.text.encode())

    @cached_property
    def roster(self) -> tuple[str, ...]:
        """Node ids of the brokers, in the file's order."""
        return tuple(broker.node_id for broker in self.brokers)

    @cached_property
    def broker_by_id(self) -> dict[str, BrokerEntry]:
        """The roster's entries by node id."""
        return {broker.node_id: broker for broker in self.brokers}

    @cached_property
    def member_by_id(self) -> dict[str, MemberEntry]:
        """The members' entries by node id."""
        return {member.node_id: member for member in self.members}

    def codec_up(self, server_round: int) -> str:
        """The codec of the contributions that round `server_round` counts."""
        warmup = self.codecs.warmup_rounds
        if warmup is None:
            warmup = codecs.get(self.codecs.up).warmup_rounds
        return WARMUP_CODEC if server_round <= warmup else self.codecs.up

    @cached_property
    def outer(self) -> outer.OuterOptimizer:
        """What moves the parameters by an update."""
        chosen = self.strategy
        return outer.get(
            chosen.name, chosen.learning_rate, chosen.momentum, chosen.nesterov, chosen.beta2, chosen.epsilon
        )

    @property
    def weighting(self) -> Literal["examples", "equal"]:
        """What a contribution's share follows. Normalised deltas count equally unless the file says otherwise: by the
        examples that went through, faster machines' data would weigh more again. Of shared data every sample weighs the
        same, whoever trains on it."""
        chosen = self.strategy.weighting
        if chosen == "auto":
            own = self.strategy.normalization == "fednova" and not self.data.samples
            return "equal" if own else "examples"
        return chosen

    def steps_counted(self, local_steps: int) -> int:
        """What a client divides its parameters' delta by, before any residual is added."""
        return local_steps if self.strategy.normalization == "fednova" else 1

    @property
    def majority(self) -> int:
        """How many brokers must agree."""
        return len(self.brokers) // 2 + 1

    @property
    def max_examples(self) -> int:
        """Most examples that one work order asks for."""
        rounds = self.rounds
        return rounds.most_steps * rounds.micro_batch * rounds.accumulation

    @property
    def deal_terms(self) -> Terms:
        """What shared data is dealt out by."""
        rounds = self.rounds
        one = rounds.local_steps * rounds.micro_batch * rounds.accumulation
        return Terms(one, self.max_examples, bool(rounds.target_seconds), rounds.max_staleness)

    @property
    def founding(self) -> "Federation":
        """The federation as it was founded, with its first roster."""
        known: Federation = self.__dict__.get("_founding", self)
        return known

    def with_brokers(self, brokers: tuple[BrokerEntry, ...]) -> "Federation":
        """The same federation, by the same fingerprint, with another roster in force."""
        founding = self.founding
        if brokers == founding.brokers:
            return founding
        changed = msgspec.structs.replace(founding, brokers=brokers)
        changed.__dict__.update(_founding=founding, text=founding.text, fingerprint=founding.fingerprint)
        return changed

    def public_key(self, node_id: str) -> bytes | None:
        """The signing key of a broker, a member or the operator; None for a stranger."""
        return self._public_keys.get(node_id)

    @cached_property
    def _public_keys(self) -> dict[str, bytes]:
        entries: tuple[BrokerEntry | MemberEntry, ...] = (*self.brokers, *self.members)
        keys = {entry.node_id: bytes.fromhex(entry.public_key) for entry in entries}
        operator = bytes.fromhex(self.operator.public_key)
        keys[node_id_of(operator)] = operator
        return keys

    def name_of(self, node_id: str) -> str:
        """What a person calls this node."""
        entry = self.broker_by_id.get(node_id) or self.member_by_id.get(node_id)
        return entry.name if entry else node_id[:8]

    def signed_by(self, operator: Identity) -> str:
        """The whole file as text, under the operator's signature."""
        signature = operator.sign("federation", self.text.encode()).signature.hex()
        return f'{self.text}{_SIGNATURE_HEADER}value = "{signature}"\n'

    @classmethod
    def load(cls, path: Path) -> "Federation":
        """Read and check `path`. Raises FederationFileError."""
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise FederationFileError(f"{path} is larger than {MAX_FILE_BYTES} bytes", "check the path")
            raw = path.read_bytes()
        except OSError as error:
            raise FederationFileError(
                f"{path} cannot be read ({error.strerror})", "name a directory that `ravnest-fed init` made"
            ) from None
        return cls.parse(raw, str(path))

    @classmethod
    def parse(cls, raw: bytes, where: str) -> "Federation":
        """Check the bytes of a federation file that came from `where`. Raises FederationFileError."""
        try:
            text = raw.decode()
            tables = tomllib.loads(text)
        except UnicodeDecodeError:
            raise FederationFileError(f"{where} is not UTF-8 text", "copy the file again") from None
        except tomllib.TOMLDecodeError as error:
            raise FederationFileError(f"{where} is not valid TOML: {error}", "copy the file again") from None
        signature = tables.pop("signature", None)
        federation = from_tables(tables, where)
        try:
            value = bytes.fromhex(msgspec.convert(signature, _Signature).value)
            signed_text = text[: text.rindex(_SIGNATURE_HEADER)]
        except (msgspec.ValidationError, ValueError):
            raise FederationFileError(f"{where} carries no operator's signature", "copy the file again") from None
        operator = bytes.fromhex(federation.operator.public_key)
        if not verify("federation", Signed(node_id_of(operator), signed_text.encode(), value), operator):
            raise FederationFileError(
                f"{where} was changed after the operator signed it",
                "settings are fixed for a federation: make a new one with `ravnest-fed init`",
            )
        if federation.text != signed_text:
            raise FederationFileError(f"{where} is signed but not in canonical form", "copy the file again")
        return federation


def from_tables(tables: Mapping[str, Any], where: str) -> Federation:
    """Turn parsed TOML `tables` into a checked Federation. Raises FederationFileError naming the setting."""
    try:
        federation = msgspec.convert(tables, Federation)
    except msgspec.ValidationError as error:
        raise FederationFileError(f"{where}: {_readable(error)}", "see docs/settings.md for every setting") from None
    check(federation, where)
    return federation


def known_settings() -> tuple[str, ...]:
    """Every setting that a person may choose when a federation is made, as `table.key`."""
    groups: dict[str, type[_Table]] = {
        "strategy": Strategy,
        "codecs": Codecs,
        "rounds": Rounds,
        "stop": Stop,
        "limits": Limits,
        "checkpoints": Checkpoints,
    }
    chosen = ("federation.name", "federation.seed", "federation.topology", "schema.shard_size")
    return (*chosen, *(f"{group}.{key}" for group, kind in groups.items() for key in kind.__struct_fields__))


def with_settings(tables: dict[str, Any], settings: Mapping[str, str]) -> None:
    """Put `settings` (text values by `table.key`, or by a key that only one table has) into `tables`.

    Raises FederationFileError for an unknown or ambiguous setting.
    """
    known = known_settings()
    for name, text in settings.items():
        fitting = [full for full in known if full == name or full.partition(".")[2] == name]
        if len(fitting) != 1:
            what = "ambiguous" if fitting else "unknown"
            raise FederationFileError(f"{what} setting {name!r}", f"use one of {', '.join(fitting or known)}")
        table, _, key = fitting[0].partition(".")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        if not isinstance(value, bool | int | float | str):
            # A date is a text here; no setting is a list or a table.
            value = text
        tables.setdefault(table, {})[key] = value


def _readable(error: msgspec.ValidationError) -> str:
    text = str(error).replace("Object contains unknown field", "unknown setting").replace("Object missing", "missing")
    return text.replace(" - at `$.", " in `").replace("`$.", "`")


def to_tables(value: Federation) -> dict[str, Any]:
    """The TOML tables of a federation. TOML has no null: a setting that is None is left out."""
    tables = msgspec.to_builtins(value, str_keys=True)

    def clean(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: clean(inner) for key, inner in item.items() if inner is not None}
        if isinstance(item, (list, tuple)):
            inner = [clean(element) for element in item]
            return inner[:-1] if inner and inner[-1] is None else inner
        return item

    cleaned: dict[str, Any] = clean(tables)
    return cleaned
