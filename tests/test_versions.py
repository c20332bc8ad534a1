"""Neighbouring versions of the protocol: what a later one appends or adds does not stop an earlier one."""

import msgspec
import pytest

from ravnest_fed.errors import RemoteProtocolError
from ravnest_fed.facts import encode
from ravnest_fed.messages import (
    PROTOCOL_VERSION,
    Hello,
    Message,
    PeerHello,
    Ready,
    Refused,
    Welcome,
    decode_to_broker,
    decode_to_client,
    decode_to_peer,
)
from tests.joined import Joined


def from_a_later_version(message: Message) -> bytes:
    """`message` as the next version may say it: with more fields behind those that are known, and its own number."""
    if isinstance(message, Hello | PeerHello | Welcome):
        message = msgspec.structs.replace(message, protocol=PROTOCOL_VERSION + 1)
    fields = msgspec.msgpack.decode(encode(message))
    return msgspec.msgpack.encode([*fields, {"new": 1}, "more"])


class Rolling(Joined):
    """Brokers of which `newer` ones speak the next version."""

    newer: frozenset[str] = frozenset()

    def send(self, source: str, target: str, message: Message) -> None:
        if self.by_id[source].name in self.newer:
            message = decode_to_peer(from_a_later_version(message))
        super().send(source, target, message)


@pytest.mark.parametrize("newer", [("b1",), ("b1", "b2"), ("b1", "b2", "b3")])
def test_rounds_are_committed_while_brokers_are_updated_one_by_one(newer: tuple[str, ...]) -> None:
    joined = Rolling.started(3, 3)
    joined.newer = frozenset(newer)
    for server_round in range(1, 4):
        joined.contribute()
        joined.pass_time(4.0)
        assert joined.rounds() == {server_round}
    assert len(joined.model_hashes()) == 1


def test_a_later_client_is_greeted_and_understood() -> None:
    joined = Joined.started(1, 2)
    client = joined.clients["c1"]
    hello = Hello(PROTOCOL_VERSION, joined.federation.fingerprint, client.identity.node_id, "", 0)
    client.received.clear()
    client.say("b1", decode_to_broker(from_a_later_version(hello)))
    client.say("b1", decode_to_broker(from_a_later_version(Ready(0))))
    assert isinstance(client.received[0], Welcome) and not client.refusals()
    welcome = decode_to_client(from_a_later_version(client.received[0]))
    assert isinstance(welcome, Welcome) and welcome.server_round == 0


def test_a_client_that_is_too_old_is_told_so() -> None:
    joined = Joined.started(1, 2)
    client = joined.clients["c1"]
    client.say("b1", Hello(PROTOCOL_VERSION - 1, joined.federation.fingerprint, client.identity.node_id, "", 0))
    answer = client.received[-1]
    assert isinstance(answer, Refused) and answer.reason == "wrong-version"


@pytest.mark.parametrize("decode", [decode_to_broker, decode_to_client, decode_to_peer])
def test_a_message_of_a_kind_that_is_not_known_yet_is_an_error_that_shells_drop(decode) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RemoteProtocolError):
        decode(msgspec.msgpack.encode(["SomethingNew", 1, 2]))
