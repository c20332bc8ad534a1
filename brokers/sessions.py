"""The clients that are connected to this broker, and those that others have."""

from dataclasses import dataclass, field

from ravnest_fed.federation import Federation
from ravnest_fed.identity import node_id_of
from ravnest_fed.messages import PROTOCOL_VERSION, Hello, Presence, Reason, Refused

OLDEST_PROTOCOL = 1


@dataclass
class Session:
    """One client's or the operator's connection after its greeting.

    `ready` is the round whose model it holds (-1: none yet), `told` what it was last told that the federation waits for,
    `since` when it began (s). A `guest` has its home elsewhere and only fetches.
    """

    session: str
    node_id: str
    operator: bool
    ready: int = -1
    told: str = ""
    since: float = 0.0
    guest: bool = False


@dataclass
class _Elsewhere:
    live: frozenset[str] = frozenset()
    away: frozenset[str] = frozenset()


@dataclass
class Sessions:
    """Who is here. A key's newest greeting supersedes its older session."""

    federation: Federation
    by_session: dict[str, Session] = field(default_factory=dict)
    by_node: dict[str, Session] = field(default_factory=dict)
    _away: set[str] = field(default_factory=set)
    _elsewhere: dict[str, _Elsewhere] = field(default_factory=dict)

    def greet(self, session: str, curve_key: str, hello: Hello, now: float = 0.0) -> Session | Refused:
        """A greeting arrived on a connection that proved `curve_key`."""
        federation = self.federation
        if hello.protocol < OLDEST_PROTOCOL:
            return Refused(Reason.WRONG_VERSION, f"this broker speaks protocol {PROTOCOL_VERSION}: update ravnest-fed")
        if hello.federation != federation.fingerprint:
            return Refused(Reason.WRONG_FEDERATION, "this broker serves another federation: use its own link")
        operator = node_id_of(bytes.fromhex(federation.operator.public_key)) == hello.node_id
        entry = federation.operator if operator else federation.member_by_id.get(hello.node_id)
        if entry is None or (curve_key and entry.curve_key != curve_key):
            return Refused(Reason.UNKNOWN_CLIENT, "this key is not a member's: ask the operator for a link")
        if not operator and hello.recipe_hash != federation.federation.recipe_hash:
            return Refused(
                Reason.WRONG_RECIPE,
                "the recipe differs from the one that the federation signs: get the operator's file",
            )
        made = Session(session, hello.node_id, operator, since=now, guest=hello.guest)
        if hello.guest:
            self.lose(session)  # a home that its client has left for another
        self.by_session[session] = made
        if not operator and not hello.guest:
            self.come_home(made)
        return made

    def come_home(self, session: Session) -> None:
        """This broker is the client's home from now on."""
        session.guest = False
        self.by_node[session.node_id] = session
        self._away.discard(session.node_id)

    def lose(self, session: str) -> bool:
        """A session ended; whether a client went with it."""
        gone = self.by_session.pop(session, None)
        if gone is None or gone.operator or self.by_node.get(gone.node_id) is not gone:
            return False
        del self.by_node[gone.node_id]
        self._away.add(gone.node_id)
        return True

    def skip(self, node_id: str) -> None:
        """A client said that it sends nothing this round."""
        self._away.add(node_id)

    def new_round(self) -> None:
        """Skips are for one round; those who left are remembered by their absence from the next commit."""
        self._away.clear()
        self._elsewhere = {peer: _Elsewhere(one.live) for peer, one in self._elsewhere.items()}

    def hear(self, peer: str, presence: Presence) -> None:
        """Another broker's word on its clients."""
        members = self.federation.member_by_id
        live = frozenset(node for node in presence.live if node in members)
        self._elsewhere[peer] = _Elsewhere(live, frozenset(presence.away) & members.keys())

    def forget_peer(self, peer: str) -> None:
        """A broker is gone; its clients will come back elsewhere."""
        self._elsewhere.pop(peer, None)

    def presence(self, server_round: int) -> Presence:
        """Our word on our clients."""
        return Presence(server_round, tuple(sorted(self.by_node)), tuple(sorted(self._away)))

    def live(self) -> frozenset[str]:
        """Clients with a session at any broker."""
        return frozenset(self.by_node).union(*(one.live for one in self._elsewhere.values()))

    def away(self) -> frozenset[str]:
        """Clients seen leaving or skipping this round, and not back anywhere."""
        live = self.live()
        words = [(frozenset(self._away), frozenset(self.by_node))]
        words += [(one.away, one.live) for one in self._elsewhere.values()]
        return frozenset(node for away, here in words for node in away if node in here or node not in live)
