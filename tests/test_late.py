"""Late is not lost: contributions on older models count, with less weight, in whichever round they arrive."""

import math
from typing import Any

import pytest

from ravnest_fed.aggregation.fixed_point import MAX_WEIGHT
from ravnest_fed.aggregation.weighting import weigh
from ravnest_fed.errors import FederationFileError
from ravnest_fed.facts import Body, Evidence, Manifest, decode
from ravnest_fed.framing import unpack
from ravnest_fed.messages import Announcement, Offer, Reason
from tests.joined import Joined, federation_of

LATE: dict[str, Any] = {"rounds": {"max_staleness": 2, "min_contributions": 1, "grace_seconds": 1.0}}
ASYNCHRONOUS: dict[str, Any] = {
    "rounds": {"mode": "asynchronous", "max_staleness": 4, "target_contributions": 2, "min_contributions": 1}
}
DELTA = 0.01


def counted(joined: Joined, server_round: int) -> dict[str, tuple[int, int]]:
    """By client's name: the base round that a commit counted, and the share."""
    broker = next(broker for broker in joined.brokers.values() if broker.alive)
    body = decode(Body, broker.disk.commits[server_round].body)
    record = body.evidence.inline or broker.disk.blobs.read(body.evidence.hash)
    manifests = [decode(Manifest, one.payload) for one in decode(Evidence, unpack(record, 2**20)).manifests]
    return {
        joined.federation.name_of(one.client): (manifest.base_round, one.share)
        for one, manifest in zip(body.counted, manifests, strict=True)
    }


def prepared(joined: Joined, name: str) -> Offer:
    """A client's offer for its order at hand, to be sent later."""
    import numpy as np

    size = joined.federation.schema.parameter_stop
    return joined.clients[name].offer(np.full(size, np.float32(DELTA)))


def test_what_comes_after_its_round_counts_in_the_next_with_less_weight() -> None:
    joined = Joined.started(3, 3, **LATE)
    late = prepared(joined, "c3")
    joined.contribute("c1", "c2")
    joined.pass_time(3.0)
    assert joined.rounds() == {1}
    joined.clients["c3"].say(joined.home_of("c3"), late)
    joined.contribute("c1", "c2")
    joined.pass_time(3.0)
    assert joined.rounds() == {2} and not joined.clients["c3"].refusals()
    assert counted(joined, 2) == {
        "c1": (1, MAX_WEIGHT),
        "c2": (1, MAX_WEIGHT),
        "c3": (0, math.isqrt(MAX_WEIGHT**2 // 2)),
    }
    assert len(joined.model_hashes()) == 1


def test_what_is_too_late_is_refused_by_name_and_is_not_counted() -> None:
    joined = Joined.started(3, 3, **LATE)
    late = prepared(joined, "c3")
    for _ in range(3):
        joined.contribute("c1", "c2")
        joined.pass_time(3.0)
    assert joined.rounds() == {3}
    joined.clients["c3"].say(joined.home_of("c3"), late)
    joined.deliver()
    assert joined.clients["c3"].refusals() == [Reason.OUT_OF_DATE]


def test_what_was_counted_is_said_to_be_and_never_counts_again() -> None:
    joined = Joined.started(3, 3, **LATE)
    first = prepared(joined, "c3")
    joined.clients["c3"].say(joined.home_of("c3"), first)
    joined.contribute("c1", "c2")
    assert joined.rounds() == {1} and "c3" in counted(joined, 1)
    for broker in joined.brokers:
        joined.clients["c3"].say(broker, first)
    joined.contribute("c1", "c2")
    joined.pass_time(3.0)
    assert set(joined.clients["c3"].refusals()) == {Reason.COUNTED}
    assert "c3" not in counted(joined, 2)


@pytest.mark.parametrize("restart", [False, True], ids=["home lives", "home restarts"])
def test_what_its_home_alone_knew_when_the_round_closed_counts_in_the_next(restart: bool) -> None:
    joined = Joined.started(3, 3, rounds={**LATE["rounds"], "min_contributions": 2})
    home = joined.by_id[joined.brokers[joined.home_of("c3")].identity.node_id]
    joined.dropping = lambda source, target, message: (
        source == home.identity.node_id and isinstance(message, Announcement)
    )
    joined.contribute()
    joined.pass_time(3.0)
    assert joined.rounds() == {1} and set(counted(joined, 1)) == {"c1", "c2"}
    joined.dropping = lambda source, target, message: False
    if restart:
        joined.kill(home.name)
        joined.restart(home.name)
    joined.pass_time(6.0)
    joined.contribute("c1", "c2")
    joined.pass_time(2.0)
    assert {name: base for name, (base, _) in counted(joined, 2).items()} == {"c1": 1, "c2": 1, "c3": 0}


def test_of_two_on_different_bases_a_round_counts_the_older_and_the_next_one_the_other() -> None:
    joined = Joined.started(3, 3, **LATE)
    late = prepared(joined, "c3")
    joined.contribute("c1", "c2")
    joined.pass_time(3.0)
    newer = prepared(joined, "c3")
    for offer in (newer, late):
        joined.clients["c3"].say(joined.home_of("c3"), offer)
    joined.contribute("c1", "c2")
    joined.pass_time(3.0)
    assert counted(joined, 2)["c3"][0] == 0
    joined.contribute("c1", "c2")
    joined.pass_time(3.0)
    assert counted(joined, 3)["c3"][0] == 1
    assert not joined.clients["c3"].refusals()


def test_without_staleness_a_late_contribution_is_out_of_date() -> None:
    joined = Joined.started(3, 3, rounds={"min_contributions": 1, "grace_seconds": 1.0})
    late = prepared(joined, "c3")
    joined.contribute("c1", "c2")
    joined.pass_time(3.0)
    joined.clients["c3"].say(joined.home_of("c3"), late)
    joined.deliver()
    assert joined.clients["c3"].refusals() == [Reason.OUT_OF_DATE]


def test_an_asynchronous_round_closes_with_its_number_whoever_they_are_by() -> None:
    joined = Joined.started(3, 4, **ASYNCHRONOUS)
    straggler = prepared(joined, "c4")
    for server_round, pair in enumerate((("c1", "c2"), ("c3", "c1"), ("c2", "c3")), 1):
        joined.contribute(*pair)
        assert joined.rounds() == {server_round} and set(counted(joined, server_round)) == set(pair)
    joined.clients["c4"].say(joined.home_of("c4"), straggler)
    joined.contribute("c1")
    assert joined.rounds() == {4}
    assert counted(joined, 4) == {"c1": (3, MAX_WEIGHT), "c4": (0, MAX_WEIGHT // 2)}
    assert len(joined.model_hashes()) == 1


def test_an_asynchronous_round_does_not_close_by_grace_before_its_number() -> None:
    joined = Joined.started(3, 4, **ASYNCHRONOUS)
    for _ in range(3):
        joined.contribute("c1", "c2")
    joined.contribute("c1")
    joined.pass_time(60.0)
    assert joined.rounds() == {3}
    joined.contribute("c3")
    assert joined.rounds() == {4}


def test_staleness_takes_its_root_off_the_share_and_never_all_of_it() -> None:
    shares = [weigh(8, 8, "equal", 1.0, math.inf, MAX_WEIGHT, staleness).share for staleness in (0, 1, 3, 8)]
    assert shares == [MAX_WEIGHT, 46340, MAX_WEIGHT // 2, MAX_WEIGHT // 3]
    assert weigh(1, 2**20, "examples", 1.0, math.inf, MAX_WEIGHT, 64).share == 1
    weight = weigh(8, 8, "equal", 2.0, 1.0, MAX_WEIGHT, 3)
    assert (weight.weight, weight.share) == (MAX_WEIGHT // 4, MAX_WEIGHT // 2)


@pytest.mark.parametrize(
    ("rounds", "strategy", "finding"),
    [
        ({"mode": "asynchronous", "target_contributions": 2}, {}, "max_staleness is 0"),
        ({"mode": "asynchronous", "max_staleness": 4}, {}, "target_contributions is 0"),
        ({"max_staleness": 65}, {}, "max_staleness is 65"),
        (
            {"mode": "asynchronous", "max_staleness": 4, "target_contributions": 2},
            {"name": "fedavgm", "momentum": 0.9},
            "outer momentum diverges",
        ),
    ],
)
def test_settings_that_cannot_go_together_are_refused_with_the_reason(
    rounds: dict[str, Any], strategy: dict[str, Any], finding: str
) -> None:
    with pytest.raises(FederationFileError, match=finding):
        federation_of(1, 2, rounds=rounds, strategy=strategy)
