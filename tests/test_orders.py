"""A broker's orders where rounds have a target time: from a client's word to what it delivered, in joined rounds too."""

from typing import Any

import msgspec
import pytest

from brokers.contributions import Contributions
from brokers.effects import Effect, Say, SendClient
from brokers.orders import WorkOrders, bounds_of
from brokers.sessions import Session
from ravnest_fed.capability import Capability, Speed
from ravnest_fed.errors import FederationFileError, RemoteProtocolError
from ravnest_fed.facts import WorkOrder, decode, decode_with, encode
from ravnest_fed.manifests import order_of
from ravnest_fed.messages import CapabilityNotice, Hello, OrderNotice, Ready, decode_to_broker
from tests.building import Contribution, Tiny, contribution, tiny
from tests.joined import Joined

SETTINGS = {"target_seconds": "10", "local_steps": "10", "micro_batch": "8", "accumulation": "2"}
ONE = tiny(settings=SETTINGS)
HEAD = ONE.replica().head
CLIENT = ONE.members[0].node_id
SESSION = Session("a session", CLIENT, False)
FAST = Capability(device="cpu", speeds=(Speed(8, 40.0), Speed(16, 80.0)), micro_batch=16)


def orders(one: Tiny = ONE) -> WorkOrders:
    return WorkOrders(one.federation, one.brokers[0])


def ordered(effects: list[Effect]) -> WorkOrder:
    """The order among the effects."""
    (notice,) = [one.message for one in effects if isinstance(one, SendClient)]
    assert isinstance(notice, OrderNotice)
    return decode(WorkOrder, notice.order.payload)


def numbers(effects: list[Effect]) -> tuple[int, int, int]:
    order = ordered(effects)
    return order.micro_batch, order.accumulation, order.local_steps


def done(work: WorkOrders, seconds: float, given_at: float = 0.0, **changes: Any) -> Contribution:
    """The client fulfils its first order after `seconds`."""
    made = contribution(ONE, HEAD, 0, **changes)
    work.delivered(made.manifest, 1000, given_at + seconds)
    return made


def test_without_a_target_all_do_the_same_whatever_they_can() -> None:
    one = tiny()
    work = orders(one)
    work.hear(CLIENT, FAST)
    effects = work.give(SESSION, one.replica().head, 0.0)
    assert numbers(effects) == (4, 1, 2) and len(effects) == 1


def test_a_clients_own_word_rules_its_first_order() -> None:
    work = orders()
    assert numbers(work.give(SESSION, HEAD, 0.0)) == (8, 2, 10)
    work = orders()
    work.hear(CLIENT, FAST)
    effects = work.give(SESSION, HEAD, 0.0)
    # A batch of 16 at 80 samples/s is 5 steps a second, so 50 in 10 s; a first order is at most 4 times 10.
    assert numbers(effects) == (16, 1, 40)
    (said,) = [one for one in effects if isinstance(one, Say)]
    assert said.fields["client"] == "c1" and "first order" in str(said.fields["because"])


def test_an_order_asked_for_again_is_the_same_one() -> None:
    work = orders()
    first = ordered(work.give(SESSION, HEAD, 0.0))
    work.hear(CLIENT, FAST)
    effects = work.give(SESSION, HEAD, 5.0)
    assert ordered(effects) == first and len(effects) == 1


def test_deliveries_rule_the_next_order() -> None:
    work = orders()
    work.hear(CLIENT, FAST)
    work.give(SESSION, HEAD, 0.0)
    made = done(work, 8.0, num_examples=640, local_steps=40, training_seconds=6.0)
    contributions = Contributions(ONE.federation, HEAD)
    contributions.add(made.signed, made.manifest, made.shards, ONE.brokers[0].node_id)
    work.closed(contributions, [CLIENT], 9.0)
    # 106.7 samples/s, and 2 s that were no training: 8 s at 0.15 s a step.
    assert numbers(work.give(SESSION, HEAD, 9.0)) == (16, 1, 53)


def test_a_delivery_to_another_broker_counts_by_its_manifest() -> None:
    work = orders()
    made = contribution(ONE, HEAD, 0, num_examples=160, local_steps=10, training_seconds=2.0)
    contributions = Contributions(ONE.federation, HEAD)
    contributions.add(made.signed, made.manifest, made.shards, ONE.brokers[1].node_id)
    work.closed(contributions, [], 3.0)
    # 0.2 s a step would allow 50 steps; without a clock on it, an order at most doubles.
    assert numbers(work.give(SESSION, HEAD, 3.0)) == (8, 2, 20)


def test_a_client_that_brings_nothing_in_time_is_asked_for_less() -> None:
    work = orders()
    work.hear(CLIENT, FAST)
    work.give(SESSION, HEAD, 0.0)
    work.closed(Contributions(ONE.federation, HEAD), [CLIENT], 40.0)
    assert ordered(work.give(SESSION, HEAD, 40.0)).local_steps <= 12


def test_a_round_that_closed_early_or_without_the_client_blames_nobody() -> None:
    for present, now in (([CLIENT], 9.0), ([], 40.0)):
        work = orders()
        work.hear(CLIENT, FAST)
        work.give(SESSION, HEAD, 0.0)
        work.closed(Contributions(ONE.federation, HEAD), present, now)
        assert ordered(work.give(SESSION, HEAD, now)).local_steps == 40


def test_every_order_is_within_what_the_federation_admits() -> None:
    work = orders()
    work.hear(CLIENT, msgspec.structs.replace(FAST, speeds=(Speed(1, 1e15),)))
    for _ in range(6):
        effects = work.give(SESSION, HEAD, 0.0)
        (notice,) = [one.message for one in effects if isinstance(one, SendClient)]
        assert isinstance(notice, OrderNotice)
        order = ordered(effects)
        assert order.max_examples <= ONE.federation.max_examples
        made = contribution(ONE, HEAD, 0, order=notice.order, local_steps=order.local_steps, num_examples=1)
        assert order_of(ONE.federation, made.manifest) == order
        work.delivered(msgspec.structs.replace(made.manifest, training_seconds=1e-9), 10, 0.001)
        work.closed(Contributions(ONE.federation, HEAD), [], 0.001)
    assert order.local_steps == 160


def test_the_greatest_order_is_the_measure_of_weights() -> None:
    assert bounds_of(ONE.federation).max_steps == 160
    assert ONE.federation.max_examples == 160 * 16
    bounded = tiny(settings={**SETTINGS, "max_local_steps": "30", "min_local_steps": "5"}).federation
    assert bounded.max_examples == 30 * 16
    assert (bounds_of(bounded).min_steps, bounds_of(bounded).max_steps) == (5, 30)
    assert tiny(settings={"local_steps": "10"}).federation.max_examples == 40


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"target_seconds": "-1"}, "rounds.target_seconds is -1"),
        ({"target_seconds": "nan"}, "rounds.target_seconds is nan"),
        ({"target_seconds": "100", "deadline_seconds": "50"}, "past rounds.deadline_seconds"),
        ({"min_local_steps": "0"}, "rounds.min_local_steps is 0"),
        ({"min_local_steps": "11"}, "rounds.min_local_steps is 11"),
        ({"max_local_steps": "9"}, "rounds.max_local_steps is 9"),
        ({"target_seconds": "0", "max_local_steps": "20"}, "every client makes rounds.local_steps"),
    ],
)
def test_targets_that_cannot_work_are_refused(changes: dict[str, str], finding: str) -> None:
    with pytest.raises(FederationFileError, match=finding):
        tiny(settings={**SETTINGS, **changes})


def test_a_capability_travels_and_a_reader_of_before_drops_it() -> None:
    raw = encode(CapabilityNotice(FAST))
    assert decode_to_broker(raw) == CapabilityNotice(FAST)
    before: msgspec.msgpack.Decoder[Hello | Ready] = msgspec.msgpack.Decoder(Hello | Ready)
    with pytest.raises(RemoteProtocolError):
        decode_with(before, raw, "a client's message")
    with pytest.raises(RemoteProtocolError):
        decode_to_broker(encode(["CapabilityNotice", {"device": "cpu", "speeds": [[1, -1.0]]}]))


# --- joined rounds ---------------------------------------------------------------------------------------------------


def joined_rounds(joined: Joined, speeds: dict[str, float], count: int) -> list[dict[str, tuple[int, float]]]:
    """Let clients of these speeds (samples/s) do `count` rounds; the samples and seconds of each, by round."""
    found = []
    for _ in range(count):
        work = {}
        for name in speeds:
            order = joined.clients[name].order
            assert order is not None
            work[name] = decode(WorkOrder, order.payload)
        began = joined.now
        took = {name: work[name].max_examples / speed for name, speed in speeds.items()}
        for name in sorted(took, key=lambda one: took[one]):
            wait = began + took[name] - joined.now
            if wait > 0:
                joined.pass_time(wait, step=wait)
            examples = work[name].max_examples
            client = joined.clients[name]
            client.contribute(joined.home_of(name), num_examples=examples, training_seconds=took[name])
            joined.deliver()
        joined.pass_time(0.1, step=0.1)
        found.append({name: (work[name].max_examples, took[name]) for name in speeds})
    return found


def started(brokers: int = 3) -> Joined:
    rounds = {
        "target_seconds": 10.0,
        "local_steps": 10,
        "micro_batch": 8,
        "grace_seconds": 1000.0,
        "max_local_steps": 2000,
    }
    return Joined.started(brokers, 4, rounds=rounds)


@pytest.mark.parametrize("brokers", [1, 3])
def test_four_unequal_clients_finish_together_and_their_work_follows_their_speed(brokers: int) -> None:
    joined = started(brokers)
    speeds = {"c1": 400.0, "c2": 200.0, "c3": 100.0, "c4": 50.0}
    found = joined_rounds(joined, speeds, 5)
    assert joined.rounds() == {5} and len(joined.model_hashes()) == 1
    for last in found[3:]:
        assert all(abs(seconds - 10.0) < 1.5 for _, seconds in last.values()), found
        shares = [last[name][0] / last["c4"][0] for name in speeds]
        assert shares == pytest.approx([8, 4, 2, 1], rel=0.1)
        longest = max(seconds for _, seconds in last.values())
        assert sum(samples for samples, _ in last.values()) / longest > 0.9 * sum(speeds.values())


def test_a_client_that_slows_down_and_recovers_is_followed_within_three_rounds() -> None:
    joined = started()
    speeds = {"c1": 400.0, "c2": 200.0, "c3": 100.0, "c4": 50.0}
    joined_rounds(joined, speeds, 5)
    slow = joined_rounds(joined, {**speeds, "c1": 80.0}, 4)
    assert abs(slow[3]["c1"][1] - 10.0) < 1.5, slow
    again = joined_rounds(joined, speeds, 4)
    assert abs(again[3]["c1"][1] - 10.0) < 1.5, again
    assert joined.rounds() == {13}


def test_a_client_that_changes_its_home_keeps_what_others_saw_of_it() -> None:
    joined = started()
    speeds = {"c1": 400.0, "c2": 200.0, "c3": 100.0, "c4": 50.0}
    joined_rounds(joined, speeds, 5)
    client = joined.clients["c1"]
    client.order = None
    client.join("b2" if joined.home_of("c1") != "b2" else "b3")
    joined.deliver()
    assert client.order is not None
    order = decode(WorkOrder, client.order.payload)
    assert abs(order.max_examples / 400.0 - 10.0) < 1.5


def test_the_operators_session_is_no_client() -> None:
    joined = started(1)
    core = joined.brokers["b1"].core
    session = core.sessions.by_session["c1"]
    core.sessions.by_session["c1"] = Session("c1", session.node_id, True)
    joined.clients["c1"].say("b1", CapabilityNotice(FAST))
    assert session.node_id not in core._orders._capabilities
