"""The client's session: finds a home broker, follows the log, works and uploads. Events and the time in, effects out.

Rules:

- one broker at a time is home; a dead one is left for the best of those that answer;
- work is done on the newest model only, and a commit ends work on the one before;
- a contribution is kept and offered again, the same bytes, to whatever home there is, until a commit moves on;
- nothing of a commit is folded before a majority's votes for it were checked.
"""

from clients import effects as fx
from clients import events as ev
from clients.following import Catching, Following
from clients.handing_in import HandingIn
from clients.homes import Homes, turned_away
from clients.leaving import Leaving
from clients.own_slice import next_slice
from clients.residual import Standing
from clients.yielding import Yielding
from ravnest_fed.capability import Capability
from ravnest_fed.errors import (
    NoDataError,
    RavnestError,
    RecipeError,
    RecipeMismatch,
    WrongFederation,
)
from ravnest_fed.facts import BlobRef, Evaluation, WorkOrder, open_signed, sign
from ravnest_fed.federation import Federation
from ravnest_fed.head import Head
from ravnest_fed.identity import Identity, Signed
from ravnest_fed.links import Link, link_brokers
from ravnest_fed.messages import (
    PROTOCOL_VERSION,
    CapabilityNotice,
    CheckpointNotice,
    CommitNotice,
    CommitsRequest,
    EvaluationNotice,
    Goodbye,
    Hello,
    Message,
    OrderNotice,
    Ready,
    Reason,
    ReceiptNotice,
    Refused,
    Skip,
    Waiting,
    Welcome,
)
from ravnest_fed.slices import Slice

WELCOME_SECONDS = 6.0
AGAIN_SECONDS, MOST_AGAIN_SECONDS = 4.0, 60.0
"""After how long without an answer something is said again, at first and at the most."""
AVOID_SECONDS = 5.0
"""How long a broker that left, or sent something wrong, is not chosen again."""
RETRY_SECONDS, MOST_RETRY_SECONDS = 5.0, 600.0
"""How long a client waits before it tries a round again that failed here, at first and at the most."""
MOST_FAILURES = 3
"""How many rounds in a row a recipe may fail before the client gives up."""


class ClientSession:
    """One client's decisions. `now` is in seconds in every method."""

    def __init__(
        self, link: Link, identity: Identity, recipe_hash: str, now: float, kept: Standing | None = None
    ) -> None:
        """`kept` is what an earlier life of this client left on disk."""
        self.link = link
        self.identity = identity
        self.federation: Federation | None = None
        self.head: Head | None = None
        self.home: str | None = None
        self._recipe_hash = recipe_hash
        self._homes = Homes(link, identity.public_key, now)
        self._hello_at = now
        self._greeted = False
        self._ever_greeted = False
        self._welcome: Welcome | None = None
        self._capability: Capability | None = None
        self._log = Following()
        self._donors: set[str] = set()
        self._order: tuple[Signed, WorkOrder] | None = None
        self._training: tuple[Signed, WorkOrder, Slice] | None = None
        self._finished = False
        self._evaluating = -1
        self._own = HandingIn(identity, kept)
        self._failures = 0
        self._failed_base = -1
        self._retry_at = now
        self._again_at = 0.0
        self._again_after = AGAIN_SECONDS
        self._wanted: dict[bytes, BlobRef] = {}
        self._leaving = Leaving()
        self._yielding = Yielding()
        self._now = now

    # --- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Take one event."""
        if self._leaving.reason:
            return [fx.End(self._leaving.reason)] if self._leaving.over(event, self.home, now) else []
        effects = self._take(event, now)
        if self._leaving.finishing and not self._leaving.reason and self._training is None and not self._own.waits:
            effects += self._leave("leaving at the owner's wish, with the round handed in")
        return effects

    def _take(self, event: ev.Event, now: float) -> list[fx.Effect]:
        self._now = now
        if not isinstance(event, ev.Tick):
            self._again_after = AGAIN_SECONDS
            self._again_at = now + AGAIN_SECONDS
        match event:
            case ev.Line(broker, state):
                return self._on_line(broker, state, now)
            case ev.FromBroker(broker, message):
                return (
                    self._on_message(broker, message, now) if broker == self.home else self._on_other(broker, message)
                )
            case ev.Pulled():
                # As any event, it has set back when the contribution is offered again: an upload that stalled is taken up
                # again within seconds.
                return []
            case ev.Fetched(blob):
                return self._on_fetched(blob)
            case ev.Missed(blob):
                return self._on_missed(blob, now)
            case ev.FederationRead(federation):
                return self._on_federation(federation)
            case ev.Prepared(head, capability):
                self.head = head
                self._capability = capability
                return [*self._evaluate(), *self._say_capability(), *self._ready()]
            case ev.CommitOpened(server_round, updates):
                return self._on_commit_opened(server_round, updates, now)
            case ev.CommitRefused(finding):
                self._log.folding = False
                return self._distrust_home(f"sent a bad commit: {finding}", now)
            case ev.Folded(head):
                return self._on_folded(head)
            case ev.Evaluated():
                return self._on_evaluated(event)
            case ev.Trained():
                return self._on_trained(event)
            case ev.Finished(base_round):
                return self._on_finished(base_round)
            case ev.Overtaken(base_round):
                return self._end_training(base_round)
            case ev.TrainingFailed(base_round, error):
                return self._on_training_failed(base_round, error)
            case ev.Yielded(base_round):
                return self._on_yielded(base_round)
            case ev.Needed(because):
                # A round under way ends at its next step by itself, and comes as any other.
                return self._yielding.change(because) + ([] if because else self._start_training())
            case ev.Leave(finish):
                if not finish or self._leaving.finishing:
                    return self._leave("leaving at the owner's wish")
                self._leaving.finishing = True
                return [fx.Tell("finishing the round", {"to drop it": "press Ctrl-C again"})]
            case ev.Tick():
                return self._on_tick(now)

    # --- home --------------------------------------------------------------------------------------------------------

    def _on_line(self, broker: str, state: ev.LineState, now: float) -> list[fx.Effect]:
        self._homes.changed(broker, state, now)
        if state == "up":
            return self._choose_home(now) or (self._greet_others() if self._greeted else [])
        self._donors.discard(broker)
        if broker == self.home:
            effects: list[fx.Effect] = [fx.Tell("home broker lost", {"broker": broker}, warning=True)]
            return effects + self._lose_home(now)
        return self._give_up(now)

    def _on_other(self, broker: str, message: Message) -> list[fx.Effect]:
        """A broker that is not home has answered: blobs may be fetched from it too."""
        if isinstance(message, Welcome) and message.federation == self.link.fingerprint:
            self._donors.add(broker)
        elif isinstance(message, Goodbye):
            self._donors.discard(broker)
        return []

    def _greet_others(self) -> list[fx.Effect]:
        """Ask the brokers that are not home to let this client fetch."""
        others = [name for name in self._homes.up() if name != self.home and name not in self._donors]
        return [fx.Send(name, self._hello(guest=True)) for name in others]

    def _hello(self, guest: bool = False) -> Hello:
        server_round = self.head.server_round if self.head else -1
        identity, fingerprint = self.identity.node_id, self.link.fingerprint
        return Hello(PROTOCOL_VERSION, fingerprint, identity, self._recipe_hash, server_round, guest)

    @property
    def _greeted_home(self) -> str | None:
        """The home broker once it has answered."""
        return self.home if self._greeted else None

    @property
    def contributions(self) -> int:
        """How many contributions of this life a commit counted."""
        return self._own.counted

    @property
    def _max_staleness(self) -> int:
        return self.federation.rounds.max_staleness if self.federation is not None else 0

    def _lose_home(self, now: float) -> list[fx.Effect]:
        self.home = None
        self._greeted = False
        self._log.forget_home()
        self._wanted = {}
        return self._choose_home(now)

    def _choose_home(self, now: float) -> list[fx.Effect]:
        if self.home is not None:
            return []
        self.home = self._homes.choose(self._ever_greeted, now)
        if self.home is None:
            return []
        self._hello_at = now
        return [fx.Send(self.home, self._hello())]

    def _give_up(self, now: float) -> list[fx.Effect]:
        """Before the first welcome, end with the reason once no broker can be had; afterwards never."""
        error = None if self._ever_greeted else self._homes.hopeless(now)
        return self._end("no broker", error) if error else []

    def _on_tick(self, now: float) -> list[fx.Effect]:
        if self.home is not None and not self._greeted and now - self._hello_at > WELCOME_SECONDS:
            self._homes.avoid(self.home, now + 4 * WELCOME_SECONDS)
            silent = self.home
            effects: list[fx.Effect] = [fx.Tell("broker is silent", {"broker": silent}, warning=True)]
            return effects + self._lose_home(now)
        return self._choose_home(now) or self._give_up(now) or self._say_again(now)

    def _say_again(self, now: float) -> list[fx.Effect]:
        """Repeat what no answer came to; every message may be repeated. The pauses grow, and any progress ends them."""
        if self.home is None or not self._greeted or self.head is None or now < self._again_at:
            return []
        idle = self._training is None and self._log.idle
        self._again_at = now + self._again_after
        self._again_after = min(2 * self._again_after, MOST_AGAIN_SECONDS)
        if self._own.waits:
            return self._own.offer(self.home)
        return self._ready() if idle and not self.head.stop else []

    # --- messages ----------------------------------------------------------------------------------------------------

    def _on_message(self, broker: str, message: Message, now: float) -> list[fx.Effect]:
        match message:
            case Welcome():
                return self._on_welcome(message)
            case Refused(manifest_hash=b""):
                return self._on_turned_away(message)
            case Refused():
                return self._on_refused(message)
            case OrderNotice(order=signed):
                return self._on_order(signed)
            case CommitNotice(server_round=server_round, commit=ref):
                self._log.commit_named(server_round, ref, self.head.server_round if self.head else None)
                return self._follow()
            case CheckpointNotice():
                self._log.checkpoint_named(message)
                return self._follow()
            case ReceiptNotice(receipt=signed):
                return self._on_receipt(signed)
            case Waiting(server_round=server_round, text=text):
                # The announcement of the round before may have been lost on the way.
                self._log.heard_of(server_round - 1)
                waiting = [fx.Tell("waiting", {"round": server_round, "for": text})] if text else []
                return [*waiting, *self._follow()]
            case Goodbye(reason=reason):
                self._homes.avoid(broker, now + AVOID_SECONDS)
                told = fx.Tell("home broker leaves", {"broker": broker, "reason": reason[:200]}, warning=True)
                return [told, *self._lose_home(now)]
        return []

    def _on_welcome(self, welcome: Welcome) -> list[fx.Effect]:
        assert self.home is not None
        if welcome.federation != self.link.fingerprint:
            return self._end(
                "wrong federation", WrongFederation("the broker serves another federation", "check the link")
            )
        first = not self._ever_greeted
        self._greeted = self._ever_greeted = True
        self._welcome = welcome
        self._log.heard_of(welcome.server_round)
        self._own.go_on_above(welcome.highest_sequence)
        effects: list[fx.Effect] = [fx.Tell("connected" if first else "reconnected", {"broker": self.home})]
        effects += self._greet_others()
        if self.federation is None:
            return effects + self._want(welcome.federation_file)
        if self.head is None:
            return effects + self._want(welcome.initial_model)
        self._own.at_another_home()
        return effects + self._say_capability() + self._ready() + self._own.offer(self.home)

    def _say_capability(self) -> list[fx.Effect]:
        """Before anything is asked for: the first order goes by it."""
        if self.home is None or not self._greeted or self._capability is None:
            return []
        return [fx.Send(self.home, CapabilityNotice(self._capability))]

    def _on_turned_away(self, refused: Refused) -> list[fx.Effect]:
        return self._end(refused.reason, turned_away(str(self.home), refused))

    def _on_federation(self, federation: Federation) -> list[fx.Effect]:
        self.federation = federation
        expected = federation.federation.recipe_hash
        if self._recipe_hash != expected:
            return self._end(
                "wrong recipe",
                RecipeMismatch(f"the recipe's hash is {self._recipe_hash[:16]}, the federation signs {expected[:16]}"),
            )
        return self._want(self._welcome.initial_model) if self._welcome else []

    def _ready(self) -> list[fx.Effect]:
        if self.home is None or not self._greeted or self.head is None:
            return []
        return [fx.Send(self.home, Ready(self.head.server_round))]

    # --- following the log -------------------------------------------------------------------------------------------

    def _follow(self) -> list[fx.Effect]:
        if self.head is None or self.home is None:
            return []
        found = self._log.next(self.head.server_round)
        if isinstance(found, CommitsRequest):
            return [fx.Send(self.home, found)]
        return self._want(found) if found is not None else []

    def _want(self, ref: BlobRef) -> list[fx.Effect]:
        if self.home is None:
            return []
        self._wanted[ref.hash] = ref
        return [fx.Fetch(ref, self.home, tuple(sorted(self._donors - {self.home})))]

    def _on_fetched(self, blob: bytes) -> list[fx.Effect]:
        ref = self._wanted.pop(blob, None)
        if ref is None or self._welcome is None:
            return []
        if ref.hash == self._welcome.federation_file.hash:
            return [fx.ReadFederation(ref)] if self.federation is None else []
        if ref.hash == self._welcome.initial_model.hash:
            return [fx.Prepare(ref)] if self.head is None else []
        catching = self._log.catching
        if catching is None:
            return []
        if not catching.missing:
            assert self.home is not None
            return [fx.OpenCommit(ref, self.home, catching.changes)]
        whole = self._log.arrived(blob)
        return self._fold(whole) if whole is not None else []

    def _on_missed(self, blob: bytes, now: float) -> list[fx.Effect]:
        if self._wanted.pop(blob, None) is None or self.home is None:
            return []
        return self._distrust_home("lacks what it announced", now)

    def _distrust_home(self, why: str, now: float) -> list[fx.Effect]:
        """Leave a broker that sent something wrong, for a while, if there is another one."""
        if self.home is None:
            return []
        told = fx.Tell("home broker left", {"broker": self.home, "because": f"it {why}"[:300]}, warning=True)
        self._homes.avoid(self.home, now + AVOID_SECONDS)
        return [told, *self._lose_home(now)]

    def _on_commit_opened(self, server_round: int, updates: tuple[BlobRef, ...], now: float) -> list[fx.Effect]:
        catching = self._log.catching
        if catching is None:
            return []
        if catching.server_round != server_round:
            return self._distrust_home(f"sent round {server_round} as round {catching.server_round}", now)
        return [effect for ref in self._log.opened(updates) for effect in self._want(ref)]

    def _fold(self, catching: Catching) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        if self._training is not None and catching.server_round - self._training[1].base_round > self._max_staleness:
            self._training = None
            effects.append(fx.AbandonTraining())
        if catching.checkpoint is not None:
            return [*effects, fx.TakeUp(catching.server_round, catching.checkpoint)]
        return [*effects, fx.Fold(catching.server_round)]

    def _on_folded(self, head: Head) -> list[fx.Effect]:
        self._log.moved_to(head.server_round)
        self.head = head
        effects = self._own.moved_to(head, self._greeted_home)
        following = self._follow()
        if following:
            return effects + following
        effects += self._follow_roster(head)
        if self._training is not None and head.stop:
            self._training = None
            effects.append(fx.AbandonTraining())
        effects += self._encode()
        if self._training is None:
            effects += self._evaluate()
        ordered = self._order is not None and self._order[1].base_round >= head.server_round
        return effects + self._start_training() + ([] if ordered else self._ready())

    def _evaluate(self) -> list[fx.Effect]:
        """Measure the head's model, once. Nothing is measured while a round is trained: both need the device."""
        if self.head is None or self._evaluating >= self.head.server_round:
            return []
        self._evaluating = self.head.server_round
        return [fx.Evaluate(self.head.server_round)]

    def _follow_roster(self, head: Head) -> list[fx.Effect]:
        """At the head of the log its roster is the one to keep lines to; those on the way there are past."""
        assert self.federation is not None
        if head.brokers == self.federation.brokers:
            return []
        self.federation = self.federation.with_brokers(head.brokers)
        brokers = link_brokers(self.federation)
        self._homes.follow(brokers)
        names = " ".join(broker.name for broker in brokers)
        return [fx.Tell("brokers changed", {"now": names}), fx.Reconnect(brokers)]

    def _on_evaluated(self, event: ev.Evaluated) -> list[fx.Effect]:
        head = self.head
        if head is None or head.server_round != event.server_round:
            return []
        effects: list[fx.Effect] = [
            fx.Tell("model", {"round": head.server_round, **{k: round(v, 4) for k, v in event.metrics.items()}})
        ]
        if self.home is not None and self._greeted:
            evaluation = Evaluation(
                self.link.fingerprint,
                self.identity.node_id,
                head.server_round,
                head.model_hash,
                max(1, event.num_examples),
                event.metrics,
            )
            effects.append(fx.Send(self.home, EvaluationNotice(sign(self.identity, evaluation))))
        if head.stop:
            effects += self._leave(f"training has ended: {head.stop}")
        return effects

    # --- work --------------------------------------------------------------------------------------------------------

    def _on_order(self, signed: Signed) -> list[fx.Effect]:
        if self.federation is None or signed.node_id not in self.federation.broker_by_id:
            return []
        order = open_signed(WorkOrder, signed, self.federation.public_key(signed.node_id))
        if order is None or order.client != self.identity.node_id or order.federation != self.link.fingerprint:
            return []
        if self.head is not None and order.base_round < self.head.server_round:
            return []
        self._order = (signed, order)
        # A broker that had not reached this base when it refused shows by its order that it has now.
        anew = self._own.offer_anew(order.base_round, self._greeted_home)
        return self._start_training() if anew is None else anew

    def _start_training(self) -> list[fx.Effect]:
        if self._order is None or self.head is None or self._log.folding or self._training is not None:
            return []
        if self._leaving.finishing:
            return []
        signed, order = self._order
        # A contribution on a later base is an earlier life's: what became of it is known once the commits are here.
        done = self._own.base_round >= order.base_round
        done = done or (self._failed_base == order.base_round and self._now < self._retry_at)
        if order.base_round != self.head.server_round or order.base_hash != self.head.commit_hash or done:
            return []
        if self._yielding.because:
            return self._yielding.skip(self.home if self._greeted else None, order.base_round)
        slice = next_slice(order, self.head, self._own.slice, self._max_staleness)
        if slice is None:
            return []
        self._training, self._finished = (signed, order, slice), False
        told = fx.Tell("training", {"round": order.base_round + 1, "local_steps": order.local_steps})
        return [told, fx.Train(order, slice)]

    def _trains(self, base_round: int) -> bool:
        return self._training is not None and self._training[1].base_round == base_round

    def _on_finished(self, base_round: int) -> list[fx.Effect]:
        """A local round is trained; it is encoded once what was handed in before is settled."""
        if not self._trains(base_round):
            return []
        self._finished = True
        return self._encode()

    def _encode(self) -> list[fx.Effect]:
        if self._training is None or not self._finished or self._own.unsettled:
            return []
        self._finished = False
        return [fx.Encode(self._training[1])]

    def _on_trained(self, event: ev.Trained) -> list[fx.Effect]:
        if self._training is None or not self._trains(event.base_round) or self.head is None:
            return []
        signed, order, slice = self._training
        self._training = None
        if self.head.server_round - event.base_round > self._max_staleness:
            return self._begin_next()
        self._failures = 0
        kept = self._own.sign(order, signed, slice, event, self._max_staleness)
        shown = {name: round(value, 4) for name, value in event.metrics.items()}
        if event.local_steps < order.local_steps:
            shown["steps"] = event.local_steps
        if self.head.server_round > event.base_round:
            shown["staleness"] = self.head.server_round - event.base_round
        told = fx.Tell("trained", {"round": order.base_round + 1, **shown, "seconds": round(event.seconds, 2)})
        return [told, kept, *self._own.offer(self._greeted_home), *self._begin_next()]

    def _end_training(self, base_round: int) -> list[fx.Effect]:
        if not self._trains(base_round):
            return []
        self._training = None
        return self._begin_next()

    def _begin_next(self) -> list[fx.Effect]:
        """The device is free: where the model has moved on meanwhile, it is measured and trained."""
        return self._evaluate() + self._start_training()

    def _on_receipt(self, signed: Signed) -> list[fx.Effect]:
        return self._own.receipt(signed, self.federation, self.home) if self.federation is not None else []

    def _on_refused(self, refused: Refused) -> list[fx.Effect]:
        if not self._own.names(refused.manifest_hash):
            return []
        if refused.reason == Reason.NO_ROOM:
            # Nothing is wrong with the contribution: it is offered to the next home.
            return self._distrust_home("has no room on its disk", self._now)
        return self._own.refused(refused, self._greeted_home)

    def _on_training_failed(self, base_round: int, error: RavnestError) -> list[fx.Effect]:
        if not self._trains(base_round):
            return []
        self._training = None
        self._failures += 1
        self._failed_base = base_round
        self._retry_at = self._now + min(RETRY_SECONDS * 2.0**self._failures, MOST_RETRY_SECONDS)
        text = str(error)
        effects: list[fx.Effect] = [fx.Tell("nothing to send", {"round": base_round + 1, "reason": text}, warning=True)]
        if self.home is not None:
            effects.append(fx.Send(self.home, Skip(base_round, text[:200])))
        if isinstance(error, RecipeError | NoDataError) and self._failures >= MOST_FAILURES:
            # A bad batch or a full memory may pass; what fails every time is the recipe's fault.
            if self.home is not None:
                effects.append(fx.Send(self.home, Goodbye("the recipe fails here")))
            return effects + self._end("the recipe fails", error)
        return effects + self._begin_next()

    def _on_yielded(self, base_round: int) -> list[fx.Effect]:
        if not self._trains(base_round):
            return []
        self._training = None
        skipped = self._yielding.skip(self.home if self._greeted else None, base_round)
        # The need may be over again by now.
        return skipped + ([] if self._yielding.because else self._begin_next())

    # --- the end -----------------------------------------------------------------------------------------------------

    def _leave(self, reason: str) -> list[fx.Effect]:
        """Say goodbye, and wait for the answer."""
        if self.home is None or not self._greeted:
            return self._end(reason, None)
        self._leaving.begin(reason, self._now)
        effects: list[fx.Effect] = [fx.AbandonTraining()] if self._training is not None else []
        return [*effects, fx.Send(self.home, Goodbye(reason))]

    def _end(self, reason: str, error: RavnestError | None) -> list[fx.Effect]:
        effects: list[fx.Effect] = [fx.AbandonTraining()] if self._training is not None else []
        return [*effects, fx.End(reason, error)]
