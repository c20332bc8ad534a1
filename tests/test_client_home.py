"""Which broker a client makes its home, when it moves, and when it gives up."""

from dataclasses import replace

import pytest

from clients import effects as fx
from clients import events as ev
from ravnest_fed.errors import BrokerUnreachable, KeyRefused, RavnestError, RecipeMismatch, WrongFederation
from ravnest_fed.messages import PROTOCOL_VERSION, Goodbye, Hello, Ready, Reason, Refused, Welcome
from tests.joining import FEDERATION_FILE, INITIAL_MODEL, ONE, ROUND_0, Client, broker_id, only, sent, told

NAMES = [broker.name for broker in ONE.federation.brokers]


def preference() -> list[str]:
    """The brokers in the order in which the client takes them for home."""
    client, found = Client(), []
    for name in NAMES:
        client.line(name, "up")
    client.tick(1.0)
    while client.session.home is not None:
        found.append(client.session.home)
        client.line(client.session.home, "down")
    assert sorted(found) == sorted(NAMES)
    return found


FIRST, SECOND, THIRD = preference()


def ending(effects: list[fx.Effect]) -> RavnestError | None:
    ends = only(effects, fx.End)
    assert len(ends) <= 1
    return ends[0].error if ends else None


def test_the_preferred_broker_is_greeted_at_once() -> None:
    client = Client()
    (effect,) = client.line(FIRST, "up")
    hello = Hello(PROTOCOL_VERSION, ONE.federation.fingerprint, client.me, "11" * 32, -1)
    assert effect == fx.Send(FIRST, hello)
    assert client.line(SECOND, "up") == [] and client.tick(0.4) == []


def test_another_broker_is_greeted_if_the_preferred_one_does_not_come_up_soon() -> None:
    client = Client()
    assert client.line(SECOND, "up") == [] and client.tick(0.4) == []
    assert [effect.broker for effect in only(client.tick(0.2), fx.Send)] == [SECOND]
    assert client.line(FIRST, "up") == [] and client.session.home == SECOND


def test_only_home_is_heard() -> None:
    client = Client()
    client.line(FIRST, "up")
    client.line(SECOND, "up")
    assert client.hear(Refused(Reason.UNKNOWN_CLIENT, "no"), SECOND) == []
    assert client.hear(Goodbye("maintenance"), SECOND) == []
    assert client.session.home == FIRST


def test_clients_spread_over_the_brokers() -> None:
    homes = set()
    for number in range(len(ONE.members)):
        members = (*ONE.members[number:], *ONE.members[:number])
        client = Client(one=replace(ONE, members=members))
        for name in NAMES:
            client.line(name, "up")
        client.tick(1.0)
        homes.add(client.session.home)
    assert len(homes) > 1


def test_with_no_broker_answering_it_ends_within_ten_seconds() -> None:
    client = Client()
    assert client.tick(5.0) == []
    for name in NAMES[:2]:
        assert client.line(name, "down") == []
    error = ending(client.tick(4.9))
    assert isinstance(error, BrokerUnreachable) and all(name in str(error) for name in NAMES)


def test_a_key_that_every_broker_refuses_ends_it_at_once() -> None:
    client = Client()
    assert client.line(NAMES[0], "refused") == [] and client.line(NAMES[1], "refused") == []
    error = ending(client.line(NAMES[2], "refused"))
    assert isinstance(error, KeyRefused) and "does not admit this key" in str(error)


def test_a_key_refused_by_some_while_others_do_not_answer_ends_it_within_ten_seconds() -> None:
    client = Client()
    client.line(NAMES[0], "refused")
    assert client.tick(1.0) == []
    assert isinstance(ending(client.tick(8.9)), KeyRefused)


def test_a_broker_with_another_key_than_the_link_names_is_no_home_and_said_to_be_so() -> None:
    client = Client()
    for name in NAMES:
        assert not only(client.line(name, "mismatch"), fx.Send)
    error = ending(client.tick(9.9))
    assert isinstance(error, KeyRefused) and "does not prove the key" in str(error)


def test_one_broker_that_answers_is_enough_whatever_the_others_do() -> None:
    client = Client()
    client.line(FIRST, "refused")
    client.line(SECOND, "mismatch")
    client.line(THIRD, "up")
    client.tick(1.0)
    assert client.session.home == THIRD and not only(client.welcome(), fx.End)
    assert not only(client.tick(60.0), fx.End)


def test_after_the_first_welcome_it_never_gives_up() -> None:
    client = Client()
    client.join()
    for name in NAMES:
        client.line(name, "down")
    for _ in range(5):
        assert client.tick(1000.0) == []
    client.line(THIRD, "up")
    assert client.session.home == THIRD and not only(client.all, fx.End)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (Reason.UNKNOWN_CLIENT, KeyRefused),
        (Reason.WRONG_RECIPE, RecipeMismatch),
        (Reason.WRONG_FEDERATION, WrongFederation),
        (Reason.WRONG_VERSION, RavnestError),
    ],
)
def test_a_client_that_is_turned_away_ends_with_the_reason(reason: str, kind: type[RavnestError]) -> None:
    client = Client()
    client.line(FIRST, "up")
    error = ending(client.hear(Refused(reason, "what the operator must do")))
    assert type(error) is kind and reason in str(error) and "what the operator must do" in str(error)


def test_a_welcome_of_another_federation_ends_it() -> None:
    client = Client()
    client.line(FIRST, "up")
    welcome = Welcome(PROTOCOL_VERSION, b"x" * 32, broker_id(FIRST), 0, 0, FEDERATION_FILE, INITIAL_MODEL)
    assert isinstance(ending(client.hear(welcome)), WrongFederation)


def test_a_recipe_that_the_federation_file_does_not_sign_ends_it() -> None:
    client = Client(recipe_hash="33" * 32)
    client.line(FIRST, "up")
    client.welcome()
    client.do(ev.Fetched(FEDERATION_FILE.hash))
    assert isinstance(ending(client.do(ev.FederationRead(ONE.federation))), RecipeMismatch)


def test_a_broker_that_never_answers_the_greeting_is_left_for_another_and_avoided() -> None:
    client = Client()
    client.line(FIRST, "up")
    client.line(SECOND, "up")
    assert client.tick(6.0) == []
    effects = client.tick(0.1)
    assert told(effects) == ["broker is silent"] and [one.broker for one in only(effects, fx.Send)] == [SECOND]
    client.welcome()
    client.line(SECOND, "down")
    assert client.session.home is None
    client.tick(30.0)
    assert client.session.home == FIRST


def test_when_home_is_lost_the_next_is_greeted_at_once_with_the_round_held() -> None:
    client = Client()
    client.join()
    assert client.session.home == FIRST
    effects = client.line(FIRST, "down")
    assert told(effects) == ["home broker lost"]
    assert [(one.broker, one.message.server_round) for one in only(effects, fx.Send)] == [(SECOND, 0)]
    effects = client.welcome()
    assert told(effects) == ["reconnected"] and sent(effects, Ready) == [Ready(0)]


def test_a_broker_that_is_not_home_may_go_without_notice() -> None:
    client = Client()
    client.join()
    assert client.line(SECOND, "down") == [] and client.session.home == FIRST


def test_a_broker_that_says_goodbye_is_left_and_not_returned_to_at_once() -> None:
    client = Client()
    client.join()
    effects = client.hear(Goodbye("maintenance"))
    assert told(effects) == ["home broker leaves"] and client.session.home == SECOND
    client.line(SECOND, "down")
    client.line(THIRD, "down")
    assert client.session.home is None
    client.tick(5.1)
    assert client.session.home == FIRST


def test_leaving_says_goodbye_and_ends_well() -> None:
    client = Client()
    client.join()
    effects = client.do(ev.Leave())
    assert len(sent(effects, Goodbye)) == 1 and not only(effects, fx.End)
    (end,) = only(client.hear(Goodbye("heard")), fx.End)
    assert end.error is None


def test_a_goodbye_without_an_answer_ends_after_a_while() -> None:
    client = Client()
    client.join()
    client.do(ev.Leave())
    assert client.tick(2.9) == []
    assert only(client.tick(0.2), fx.End)


@pytest.mark.parametrize("event", [ev.Leave(), ev.Line(FIRST, "down")])
def test_asking_twice_or_losing_home_ends_at_once(event: ev.Event) -> None:
    client = Client()
    client.join()
    client.do(ev.Leave())
    assert only(client.do(event), fx.End)


def test_leaving_before_any_welcome_just_ends() -> None:
    client = Client()
    client.line(FIRST, "up")
    assert client.do(ev.Leave()) == [fx.End("leaving at the owner's wish")]


def test_home_lost_while_the_first_files_come_starts_over_at_the_next() -> None:
    client = Client()
    for name in NAMES:
        client.line(name, "up")
    client.tick(1.0)
    client.welcome()
    client.line(FIRST, "down")
    effects = client.welcome()
    assert only(effects, fx.Fetch) == [fx.Fetch(FEDERATION_FILE, SECOND)]
    client.do(ev.Fetched(FEDERATION_FILE.hash))
    client.line(SECOND, "down")
    assert only(client.do(ev.FederationRead(ONE.federation)), fx.Fetch) == [fx.Fetch(INITIAL_MODEL, THIRD)]
    assert only(client.welcome(), fx.Fetch) == [fx.Fetch(INITIAL_MODEL, THIRD)]
    assert client.do(ev.Fetched(INITIAL_MODEL.hash)) == [fx.Prepare(INITIAL_MODEL)]
    assert sent(client.do(ev.Prepared(ROUND_0)), Ready) == [Ready(0)]
