"""The federation file: everything that all nodes of one training run must agree on, signed by its operator.

`federation.toml` is plain TOML that a person can read; its last table, `[signature]`, signs the bytes above it. The
fingerprint of those bytes names the federation everywhere: in links, handshakes, manifests and commits.
"""

import math
import tomllib
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import tomli_w

from ravnest_fed import codecs
from ravnest_fed.aggregation import outer
from ravnest_fed.errors import FederationFileError
from ravnest_fed.hashing import digest
from ravnest_fed.identity import Identity, Signed, node_id_of, verify
from ravnest_fed.parameters import Schema

FORMAT = 1
FILE_NAME = "federation.toml"
INITIAL_MODEL = "model.safetensors"
MAX_FILE_BYTES = 16 * 2**20
WARMUP_CODEC = "int4"
"""What contributions travel in during warm-up: it costs no loss, and least of the codecs that keep no residual."""
MAX_FEEDBACK_MOMENTUM = 0.5
"""Residuals are a momentum of their own; with outer momentum above this, training diverged."""
MAX_ADAPTIVE_RATE = 0.1
"""An adaptive strategy's round moves each parameter by about its learning rate, whatever the update's size, unless
epsilon is of that size."""
MAX_STALENESS = 64
"""Most rounds that a contribution may be behind."""
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

    name: Literal["fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad"] = "fedavg"
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
        examples that went through, faster machines' data would weigh more again."""
        chosen = self.strategy.weighting
        if chosen == "auto":
            return "equal" if self.strategy.normalization == "fednova" else "examples"
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


def check(federation: Federation, where: str) -> None:
    """Raise FederationFileError for settings that cannot work, or are known to diverge, with the reason."""

    def refuse(setting: str, reason: str, remedy: str) -> None:
        raise FederationFileError(f"{where}: {setting} {reason}", remedy)

    if federation.federation.format != FORMAT:
        refuse("federation.format", f"is {federation.federation.format}", f"this version reads format {FORMAT}")
    rounds, strategy, limits, stop = federation.rounds, federation.strategy, federation.limits, federation.stop
    for name in ("local_steps", "micro_batch", "accumulation", "min_contributions"):
        if not 1 <= getattr(rounds, name) <= 2**31:
            refuse(f"rounds.{name}", f"is {getattr(rounds, name)}", f"use 1 to {2**31}")
    for name in ("grace_seconds", "min_grace_seconds", "max_grace_seconds", "deadline_seconds", "target_seconds"):
        if not (math.isfinite(getattr(rounds, name)) and getattr(rounds, name) >= 0):
            refuse(f"rounds.{name}", f"is {getattr(rounds, name)}", "use a duration in seconds")
    if rounds.min_grace_seconds > rounds.max_grace_seconds:
        refuse("rounds.min_grace_seconds", "is above rounds.max_grace_seconds", "lower it")
    if rounds.target_seconds > rounds.deadline_seconds:
        refuse("rounds.target_seconds", "is past rounds.deadline_seconds", "lower it, or raise the deadline")
    if not 1 <= rounds.min_local_steps <= rounds.local_steps:
        refuse("rounds.min_local_steps", f"is {rounds.min_local_steps}", "use 1 to rounds.local_steps")
    if rounds.max_local_steps and not rounds.local_steps <= rounds.max_local_steps <= 2**31:
        refuse("rounds.max_local_steps", f"is {rounds.max_local_steps}", "use at least rounds.local_steps, or 0")
    _check_staleness(federation, refuse)
    if not rounds.target_seconds and (rounds.max_local_steps or rounds.min_local_steps > 1):
        refuse(
            "rounds.min_local_steps or rounds.max_local_steps",
            "is set, but every client makes rounds.local_steps",
            "set rounds.target_seconds too, or leave both out",
        )
    if rounds.target_contributions and rounds.target_contributions < rounds.min_contributions:
        refuse("rounds.target_contributions", "is below rounds.min_contributions", "raise it, or use 0 for everybody")
    if federation.members and rounds.min_contributions > len(federation.members):
        refuse(
            "rounds.min_contributions",
            f"is {rounds.min_contributions}, but there are {len(federation.members)} members: no round could close",
            "lower it, or make more member links",
        )
    if not 1 <= limits.max_contributions <= 2**20:
        refuse("limits.max_contributions", f"is {limits.max_contributions}", "use 1 to 1048576")
    if max(rounds.min_contributions, rounds.target_contributions) > limits.max_contributions:
        refuse("limits.max_contributions", "is below what a round needs", "raise it")
    if not 1 <= strategy.max_weight <= 65536:
        refuse("strategy.max_weight", f"is {strategy.max_weight}", "use 1 to 65536")
    if not (0.0 < strategy.learning_rate <= 10.0 and 0.0 <= strategy.momentum < 1.0):
        refuse("strategy", "has a learning rate or momentum that diverges", "use 0 < learning_rate, momentum < 1")
    if strategy.name == "fedavg" and (strategy.momentum != 0.0 or strategy.nesterov):
        refuse("strategy.momentum", "is set, but fedavg has none", "use strategy.name = fedavgm")
    _check_adaptive(strategy, refuse)
    if not strategy.clip_factor >= 0 or not 1 <= strategy.norm_history <= 65536:
        refuse("strategy.clip_factor or strategy.norm_history", "is out of range", "see docs/settings.md")
    if not 0.0 <= strategy.proximal <= 1000.0:
        refuse("strategy.proximal", f"is {strategy.proximal}", "use 0 (off) to 1000; 0.001 to 1 is usual")
    _check_codecs(federation, refuse)
    if stop.date:
        try:
            if datetime.fromisoformat(stop.date).tzinfo is None:
                refuse("stop.date", f"{stop.date!r} names no time zone", "write it like 2030-01-31T18:00:00+00:00")
        except ValueError:
            refuse("stop.date", f"{stop.date!r} is no date", "write it like 2030-01-31T18:00:00+00:00")
    if bool(stop.metric) != (stop.at_least is not None or stop.at_most is not None):
        refuse(
            "stop.metric", "needs a bound, and a bound a metric", "set stop.metric and stop.at_least or stop.at_most"
        )
    if not 0 <= federation.checkpoints.checkpoint_every <= 2**31:
        refuse("checkpoints.checkpoint_every", "is out of range", "use a number of rounds, or 0 for no checkpoints")
    if not 1 <= federation.checkpoints.keep <= 1000:
        refuse("checkpoints.keep", f"is {federation.checkpoints.keep}", "use 1 to 1000; 2 survive a damaged file")
    if stop.rounds < 0:
        refuse("stop.rounds", f"is {stop.rounds}", "use 0 for no limit")
    _check_nodes(federation, refuse)
    federation.schema.check()


def _check_staleness(federation: Federation, refuse: Any) -> None:
    rounds, strategy = federation.rounds, federation.strategy
    if not 0 <= rounds.max_staleness <= MAX_STALENESS:
        refuse("rounds.max_staleness", f"is {rounds.max_staleness}", f"use 0 to {MAX_STALENESS}")
    if rounds.mode == "synchronous":
        return
    if rounds.max_staleness < 1:
        refuse("rounds.max_staleness", "is 0, but asynchronous rounds count work on older models", "use 4 to 16")
    if rounds.target_contributions < 1:
        refuse("rounds.target_contributions", "is 0, but asynchronous rounds close with a number", "use 1 or more")
    if strategy.momentum > 0.0 or strategy.nesterov:
        refuse(
            "strategy.momentum",
            "is set, but with deltas of several rounds' age outer momentum diverges",
            "use momentum 0, and a strategy.learning_rate of about 0.5, in asynchronous rounds",
        )


def _check_adaptive(strategy: Strategy, refuse: Any) -> None:
    adaptive = strategy.name in outer.ADAPTIVE
    if (not adaptive or strategy.name == "fedadagrad") and strategy.beta2 != outer.BETA2:
        refuse("strategy.beta2", f"is set, but {strategy.name} has none", "use fedadam or fedyogi, or leave it out")
    if not adaptive:
        if strategy.epsilon != outer.EPSILON:
            refuse("strategy.epsilon", f"is set, but {strategy.name} has none", "use fedadam, or leave it out")
        return
    if strategy.nesterov:
        refuse("strategy.nesterov", f"is set, but {strategy.name} has none", "use fedavgm, or leave it out")
    if not 0.0 <= strategy.beta2 <= 0.9999:
        refuse("strategy.beta2", f"is {strategy.beta2}", "use 0 to 0.9999; 0.99 is usual")
    if not 1e-12 <= strategy.epsilon <= 1.0:
        refuse("strategy.epsilon", f"is {strategy.epsilon}", "use 1e-12 to 1; 0.001 is usual")
    if strategy.learning_rate > max(MAX_ADAPTIVE_RATE, 10.0 * strategy.epsilon):
        refuse(
            "strategy.learning_rate",
            f"is {strategy.learning_rate}, which diverges with {strategy.name}: a round moves each parameter by about it",
            f"use at most {MAX_ADAPTIVE_RATE}, or a greater epsilon; 0.001 to 0.03 is usual",
        )


def _check_codecs(federation: Federation, refuse: Any) -> None:
    for name in ("up", "down"):
        if getattr(federation.codecs, name) not in codecs.names():
            refuse(
                f"codecs.{name}", f"is {getattr(federation.codecs, name)!r}", f"use one of {', '.join(codecs.names())}"
            )
    up, down, warmup = federation.codecs.up, federation.codecs.down, federation.codecs.warmup_rounds
    keeping = [name for name in codecs.names() if codecs.get(name).feedback_decay is None]
    if down not in keeping:
        refuse(
            "codecs.down",
            f"is {down!r}, which diverges without error feedback, and an update is encoded without",
            f"use one of {', '.join(keeping)}",
        )
    if up not in keeping and federation.strategy.momentum > MAX_FEEDBACK_MOMENTUM:
        refuse(
            "strategy.momentum",
            f"is {federation.strategy.momentum}, which diverges with codecs.up = {up}: its residual is a momentum already",
            f"use strategy.momentum of at most {MAX_FEEDBACK_MOMENTUM}, or codecs.up = {WARMUP_CODEC}",
        )
    if warmup is not None and not 0 <= warmup <= 2**31:
        refuse("codecs.warmup_rounds", f"is {warmup}", f"use 0 to {2**31}")
    if warmup and up in keeping:
        refuse("codecs.warmup_rounds", f"is {warmup}, but {up} needs no warm-up", "use 0, or leave it out")


def _check_nodes(federation: Federation, refuse: Any) -> None:
    if not federation.brokers:
        refuse("brokers", "is empty", "name at least one broker")
    if federation.federation.topology == "parameter-server" and len(federation.brokers) != 1:
        refuse("federation.topology", "parameter-server has one broker", "use butterfly for several")
    entries: tuple[BrokerEntry | MemberEntry, ...] = (*federation.brokers, *federation.members)
    names = [entry.name for entry in entries]
    keys = [entry.public_key for entry in entries]
    operator = (federation.operator.public_key, federation.operator.curve_key)
    for value in (*keys, *(entry.curve_key for entry in entries), *operator):
        try:
            if len(bytes.fromhex(value)) != 32:
                raise ValueError
        except ValueError:
            refuse("a key", f"{value[:16]!r} is not 32 bytes of hex", "copy the file again")
    if len(set(names)) != len(names) or len(set(keys)) != len(keys):
        refuse("brokers and members", "hold a name or a key twice", "give each node its own")


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
