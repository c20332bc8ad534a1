"""Who is connected to a broker: greetings, supersession, and what brokers tell each other of their clients."""

import msgspec
import pytest

from brokers.sessions import Session, Sessions
from ravnest_fed.identity import Identity
from ravnest_fed.messages import PROTOCOL_VERSION, Hello, Presence, Reason, Refused
from tests.building import Tiny, identity, tiny


@pytest.fixture(scope="module")
def one() -> Tiny:
    return tiny()


@pytest.fixture
def sessions(one: Tiny) -> Sessions:
    return Sessions(one.federation)


def hello(one: Tiny, who: Identity, **changes: object) -> Hello:
    federation = one.federation
    made = Hello(PROTOCOL_VERSION, federation.fingerprint, who.node_id, federation.federation.recipe_hash, -1)
    return msgspec.structs.replace(made, **changes)


def greet(sessions: Sessions, one: Tiny, session: str, member: int) -> Session:
    who = one.members[member]
    found = sessions.greet(session, who.curve_public.hex(), hello(one, who))
    assert isinstance(found, Session)
    return found


def ids(one: Tiny, *members: int) -> frozenset[str]:
    return frozenset(one.members[member].node_id for member in members)


def test_a_member_is_welcome_and_live(sessions: Sessions, one: Tiny) -> None:
    found = greet(sessions, one, "s1", 0)
    assert not found.operator and found.ready == -1
    assert sessions.by_session == {"s1": found} and sessions.live() == ids(one, 0) and not sessions.away()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 0}, Reason.WRONG_VERSION),
        ({"federation": b"x" * 32}, Reason.WRONG_FEDERATION),
        ({"node_id": "ab" * 16}, Reason.UNKNOWN_CLIENT),
        ({"recipe_hash": "22" * 32}, Reason.WRONG_RECIPE),
    ],
)
def test_a_greeting_that_does_not_fit_is_refused_by_name_and_a_right_one_taken_afterwards(
    sessions: Sessions, one: Tiny, changes: dict[str, object], reason: str
) -> None:
    who = one.members[0]
    refused = sessions.greet("s1", who.curve_public.hex(), hello(one, who, **changes))
    assert isinstance(refused, Refused) and refused.reason == reason and refused.text and not refused.manifest_hash
    assert not sessions.by_session and not sessions.live()
    greet(sessions, one, "s1", 0)


def test_a_node_id_without_its_own_connection_key_is_refused(sessions: Sessions, one: Tiny) -> None:
    for curve_key in (one.members[1].curve_public.hex(), identity("stranger").curve_public.hex()):
        refused = sessions.greet("s1", curve_key, hello(one, one.members[0]))
        assert isinstance(refused, Refused) and refused.reason == Reason.UNKNOWN_CLIENT
    assert not sessions.live()


def test_a_later_protocol_version_is_welcome(sessions: Sessions, one: Tiny) -> None:
    who = one.members[0]
    found = sessions.greet("s1", who.curve_public.hex(), hello(one, who, protocol=PROTOCOL_VERSION + 1))
    assert isinstance(found, Session)


def test_the_operator_is_welcome_with_any_recipe_but_is_no_client(sessions: Sessions, one: Tiny) -> None:
    key = one.operator.curve_public.hex()
    found = sessions.greet("s1", key, hello(one, one.operator, recipe_hash=""))
    assert isinstance(found, Session) and found.operator
    assert not sessions.live() and not sessions.lose("s1") and not sessions.away() and not sessions.by_session


def test_brokers_keys_are_not_clients(sessions: Sessions, one: Tiny) -> None:
    who = one.brokers[0]
    refused = sessions.greet("s1", who.curve_public.hex(), hello(one, who))
    assert isinstance(refused, Refused) and refused.reason == Reason.UNKNOWN_CLIENT


def test_a_newer_greeting_supersedes_and_the_end_of_the_old_session_takes_nobody_away(
    sessions: Sessions, one: Tiny
) -> None:
    greet(sessions, one, "old", 0)
    newer = greet(sessions, one, "new", 0)
    assert sessions.by_node == {newer.node_id: newer}
    assert not sessions.lose("old")
    assert sessions.live() == ids(one, 0) and not sessions.away()
    assert sessions.lose("new")
    assert not sessions.live() and sessions.away() == ids(one, 0)


def test_a_client_that_left_is_away_until_it_is_back_or_the_round_ends(sessions: Sessions, one: Tiny) -> None:
    greet(sessions, one, "s1", 0)
    sessions.lose("s1")
    assert sessions.away() == ids(one, 0) and not sessions.lose("s1")
    greet(sessions, one, "s2", 0)
    assert not sessions.away()
    sessions.lose("s2")
    sessions.new_round()
    assert not sessions.away()


def test_a_client_that_skips_is_away_though_connected_for_one_round(sessions: Sessions, one: Tiny) -> None:
    greet(sessions, one, "s1", 0)
    sessions.skip(one.members[0].node_id)
    assert sessions.away() == ids(one, 0) and sessions.live() == ids(one, 0)
    assert sessions.presence(3) == Presence(3, tuple(ids(one, 0)), tuple(ids(one, 0)))
    sessions.new_round()
    assert not sessions.away()


def test_another_brokers_clients_are_live_and_its_word_replaces_the_one_before(sessions: Sessions, one: Tiny) -> None:
    greet(sessions, one, "s1", 0)
    sessions.hear("b2", Presence(0, tuple(ids(one, 1, 2)), ()))
    assert sessions.live() == ids(one, 0, 1, 2)
    sessions.hear("b2", Presence(0, tuple(ids(one, 1)), tuple(ids(one, 2))))
    assert sessions.live() == ids(one, 0, 1) and sessions.away() == ids(one, 2)
    sessions.forget_peer("b2")
    assert sessions.live() == ids(one, 0) and not sessions.away()


def test_strangers_in_another_brokers_word_do_not_count(sessions: Sessions, one: Tiny) -> None:
    sessions.hear("b2", Presence(0, ("ab" * 16, one.operator.node_id), ("cd" * 16,)))
    assert not sessions.live() and not sessions.away()


def test_a_client_that_moved_to_another_broker_is_not_away(sessions: Sessions, one: Tiny) -> None:
    greet(sessions, one, "s1", 0)
    sessions.lose("s1")
    sessions.hear("b2", Presence(0, tuple(ids(one, 0)), ()))
    assert sessions.live() == ids(one, 0) and not sessions.away()
    sessions.hear("b2", Presence(0, (), ()))
    assert sessions.away() == ids(one, 0)


def test_a_client_that_came_here_is_not_away_by_its_old_brokers_word(sessions: Sessions, one: Tiny) -> None:
    sessions.hear("b2", Presence(0, (), tuple(ids(one, 0))))
    assert sessions.away() == ids(one, 0)
    greet(sessions, one, "s1", 0)
    assert not sessions.away()


def test_a_skip_at_another_broker_counts_and_ends_with_the_round_while_its_clients_stay(
    sessions: Sessions, one: Tiny
) -> None:
    sessions.hear("b2", Presence(0, tuple(ids(one, 0, 1)), tuple(ids(one, 1))))
    assert sessions.away() == ids(one, 1)
    sessions.new_round()
    assert not sessions.away() and sessions.live() == ids(one, 0, 1)


def test_a_guest_is_neither_live_nor_away_and_leaves_its_home_alone(sessions: Sessions, one: Tiny) -> None:
    home = greet(sessions, one, "s1", 0)
    who = one.members[0]
    guest = sessions.greet("s2", who.curve_public.hex(), hello(one, who, guest=True))
    assert isinstance(guest, Session) and guest.guest
    assert sessions.by_node[who.node_id] is home and set(sessions.by_session) == {"s1", "s2"}
    assert not sessions.lose("s2") and sessions.live() == ids(one, 0)


def test_a_guest_that_comes_home_and_a_home_that_becomes_a_guests_are_told_apart(sessions: Sessions, one: Tiny) -> None:
    who = one.members[0]
    sessions.greet("s1", who.curve_public.hex(), hello(one, who, guest=True))
    assert not sessions.live()
    greet(sessions, one, "s1", 0)
    assert sessions.live() == ids(one, 0)
    sessions.greet("s1", who.curve_public.hex(), hello(one, who, guest=True))
    assert not sessions.live() and sessions.by_session["s1"].guest


def test_a_guest_that_speaks_as_at_home_is_at_home(sessions: Sessions, one: Tiny) -> None:
    who = one.members[0]
    guest = sessions.greet("s1", who.curve_public.hex(), hello(one, who, guest=True))
    assert isinstance(guest, Session)
    sessions.come_home(guest)
    assert sessions.live() == ids(one, 0) and not guest.guest
