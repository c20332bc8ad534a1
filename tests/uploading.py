"""A broker's intake without a broker: a test offers, says what arrived, and what the inspection found."""

from typing import Any

import msgspec

from brokers.contributions import Contributions
from brokers.effects import Effect, Fetch, Inspect, SendClient
from brokers.events import Inspected
from brokers.intake import Intake
from brokers.sequences import Sequences
from ravnest_fed.head import Head
from ravnest_fed.messages import Offer, Refused
from tests.building import Contribution, Tiny, contribution, tiny

ONE = tiny()
HEAD = ONE.replica().head
LATER = msgspec.structs.replace(HEAD, server_round=3, commit_hash=b"c" * 32, scale_bits=20)


class Desk:
    """One broker's intake on top of `head`, with what the round took so far."""

    def __init__(self, head: Head = HEAD, one: Tiny = ONE) -> None:
        self.one = one
        self.head = head
        self.intake = Intake(one.federation, one.brokers[0])
        self.known = Contributions(one.federation, head)
        self.sequences = Sequences({}, 1 + one.federation.rounds.max_staleness)

    def offer(self, offer: Offer, session: str = "s") -> list[Effect]:
        return self.intake.offer(session, offer, self.head, self.known, self.sequences)

    def upload(self, offer: Offer, session: str = "s") -> list[Effect]:
        """Offer, and let every shard arrive."""
        effects = self.offer(offer, session)
        for blob in dict.fromkeys(effect.ref.hash for effect in effects if isinstance(effect, Fetch)):
            effects += self.intake.on_fetched(blob)
        return effects

    def admit(self, made: Contribution, session: str = "s") -> list[Effect]:
        """Offer, upload and inspect a sound contribution, and hand it to the round."""
        effects = self.upload(made.offer, session)
        assert [type(effect) for effect in effects if not isinstance(effect, Fetch)] == [Inspect], effects
        effects = self.intake.on_inspected(Inspected(made.manifest_hash, "", ""), self.head)
        taken = self.intake.admitted.pop()
        assert not self.intake.admitted
        self.known.add(taken.signed, taken.manifest, taken.shards, self.one.brokers[0].node_id)
        self.sequences.saw(taken.manifest.client, taken.manifest.sequence, made.manifest_hash)
        return effects


def refusals(effects: list[Effect]) -> list[tuple[str, str]]:
    """Session and reason of every refusal."""
    return [
        (effect.session, effect.message.reason)
        for effect in effects
        if isinstance(effect, SendClient) and isinstance(effect.message, Refused)
    ]


def good(member: int = 0, head: Head = HEAD, **changes: Any) -> Contribution:
    """A sound contribution; `changes` as `contribution` takes them."""
    return contribution(ONE, head, member, **changes)
