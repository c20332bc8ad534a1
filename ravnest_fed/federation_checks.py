"""Which settings of a federation file cannot work, or are known to diverge, and why."""

import math
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ravnest_fed import codecs
from ravnest_fed.aggregation import outer
from ravnest_fed.errors import FederationFileError

if TYPE_CHECKING:
    from ravnest_fed.federation import BrokerEntry, Federation, MemberEntry, Strategy

FORMAT = 1
WARMUP_CODEC = "int4"
"""What contributions travel in during warm-up: it costs no loss, and least of the codecs that keep no residual."""
MAX_FEEDBACK_MOMENTUM = 0.5
"""Residuals are a momentum of their own; with outer momentum above this, training diverged."""
MAX_ADAPTIVE_RATE = 0.1
"""An adaptive strategy's round moves each parameter by about its learning rate, whatever the update's size, unless
epsilon is of that size."""
MAX_STALENESS = 64
"""Most rounds that a contribution may be behind."""


def check(federation: "Federation", where: str) -> None:
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
    if not 0 <= federation.data.samples <= 2**40:
        refuse("data.samples", f"is {federation.data.samples}", f"use 0 (clients have their own data) to {2**40}")
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
    _check_scaffold(federation, refuse)
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


def _check_staleness(federation: "Federation", refuse: Any) -> None:
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


def _check_adaptive(strategy: "Strategy", refuse: Any) -> None:
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


def _check_scaffold(federation: "Federation", refuse: Any) -> None:
    strategy = federation.strategy
    if strategy.name != "scaffold":
        return
    if strategy.momentum != 0.0 or strategy.nesterov:
        refuse("strategy.momentum", "is set, but scaffold has none", "leave it out")
    if federation.data.samples:
        refuse(
            "strategy.name",
            "is scaffold, which corrects for the differences of clients' own data, but here they share one data set",
            "use fedavg, fedavgm or an adaptive strategy",
        )
    if strategy.normalization != "fednova":
        refuse(
            "strategy.normalization",
            f"is {strategy.normalization!r}, but scaffold's controls are means of deltas a step",
            'use "fednova", or leave it out',
        )
    if federation.weighting != "equal":
        refuse("strategy.weighting", "is not equal, but scaffold's control is the members' plain mean", "leave it out")
    if federation.rounds.max_staleness:
        refuse("rounds.max_staleness", "is set, but an old delta would renew a control that has moved on", "use 0")
    if codecs.get(federation.codecs.up).feedback_decay is not None:
        refuse(
            "codecs.up",
            f"is {federation.codecs.up!r}, whose residual would enter a client's control",
            f"use {WARMUP_CODEC} or int8 with scaffold",
        )


def _check_codecs(federation: "Federation", refuse: Any) -> None:
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


def _check_nodes(federation: "Federation", refuse: Any) -> None:
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
