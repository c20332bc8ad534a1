"""Changes of the roster: what the operator may change, and rounds on both sides of a change."""

import msgspec
import pytest

from brokers import events as ev
from ravnest_fed.decree import check_votes
from ravnest_fed.errors import VerificationError
from ravnest_fed.facts import Body, Commit, RosterChange, decode, sign
from ravnest_fed.federation import BrokerEntry, Federation
from ravnest_fed.head import roster_after
from ravnest_fed.identity import Identity, Signed
from ravnest_fed.messages import ChangeNotice, Hello, Refused
from ravnest_fed.roster import MAX_BROKERS, finding, load_changes, roster_for, save_changes, with_changes
from tests.joined import Joined, JoinedBroker, identity, keys_of


def entry(name: str, address: str = "") -> BrokerEntry:
    place = address or name
    return BrokerEntry(
        name=name, **keys_of(identity(name)), client_address=f"tcp://{place}:1", peer_address=f"tcp://{place}:2"
    )


def change(
    of: Federation,
    action: str,
    broker: BrokerEntry,
    number: int = 1,
    by: Identity | None = None,
    **other: object,
) -> Signed:
    fields = msgspec.structs.asdict(broker)
    made = RosterChange(federation=of.fingerprint, number=number, action=action, **fields)
    return sign(by or identity("operator"), msgspec.structs.replace(made, **other))


def started() -> Joined:
    joined = Joined.started(3, 3)
    for server_round in (1, 2):
        joined.contribute()
        assert joined.rounds() == {server_round}
    return joined


def known(joined: Joined, name: str) -> BrokerEntry:
    return next(one for one in joined.brokers["b1"].core.federation.brokers if one.name == name)


def ask(joined: Joined, signed: Signed, broker: str = "b1") -> list[str]:
    """The operator tells a broker; the findings it answers with."""
    core = joined.brokers[broker].core
    operator = identity("operator")
    joined.to_client.clear()
    greeting = Hello(1, joined.federation.fingerprint, operator.node_id, "", -1)
    joined.brokers[broker].handle(ev.FromClient("operator", operator.curve_public.hex(), greeting))
    joined.brokers[broker].handle(ev.FromClient("operator", operator.curve_public.hex(), ChangeNotice(signed)))
    joined.deliver()
    assert core is joined.brokers[broker].core
    return [one.text for _, session, one in joined.to_client if session == "operator" and isinstance(one, Refused)]


FEDERATION = Joined.started(3, 2).federation
ROSTER = (entry("b1"), entry("b2"), entry("b3"))


@pytest.mark.parametrize(
    ("signed", "wrong"),
    [
        (change(FEDERATION, "add", entry("b4"), by=identity("b1")), "not signed by this federation's operator"),
        (change(FEDERATION, "add", entry("b4"), federation=b"x" * 32), "not signed by this federation's operator"),
        (change(FEDERATION, "add", entry("b4"), number=2), "0 were committed"),
        (change(FEDERATION, "add", entry("b2")), "there is a broker b2 already"),
        (change(FEDERATION, "add", entry("b4", "b2")), "broker b2 has the same address"),
        (change(FEDERATION, "add", entry("b4"), public_key=ROSTER[1].public_key), "broker b2 has the same key"),
        (change(FEDERATION, "add", entry("b4"), public_key="ab"), "impossible length"),
        (change(FEDERATION, "add", entry("b4"), curve_key="xyz"), "not hexadecimal"),
        (change(FEDERATION, "remove", entry("b9")), "there is no broker b9"),
        (change(FEDERATION, "readdress", entry("b2"), public_key="ab" * 32), "broker b2 has other keys"),
        (change(FEDERATION, "readdress", entry("b2", "b1")), "broker b1 has the same address"),
        (change(FEDERATION, "crown", entry("b2")), "no action 'crown'"),
        (change(FEDERATION, "add", entry("b4")), ""),
        (change(FEDERATION, "remove", entry("b2")), ""),
        (change(FEDERATION, "readdress", entry("b2", "elsewhere")), ""),
    ],
)
def test_a_change_that_does_not_hold_is_named(signed: Signed, wrong: str) -> None:
    found = finding(FEDERATION, ROSTER, 0, signed)
    assert (wrong in found) if wrong else found == ""


def test_the_last_broker_stays_and_rosters_are_bounded() -> None:
    assert "last broker" in finding(FEDERATION, ROSTER[:1], 0, change(FEDERATION, "remove", entry("b1")))
    many = tuple(entry(f"x{number}") for number in range(MAX_BROKERS))
    assert "already" in finding(FEDERATION, many, 0, change(FEDERATION, "add", entry("b4")))


def test_another_roster_leaves_the_federation_its_name() -> None:
    changed = FEDERATION.with_brokers(ROSTER[:2])
    assert changed.fingerprint == FEDERATION.fingerprint and changed.text == FEDERATION.text
    assert (changed.majority, len(changed.roster)) == (2, 2)
    assert changed.founding is FEDERATION and changed.with_brokers(FEDERATION.brokers) is FEDERATION


def test_the_roster_of_a_round_follows_from_the_changes_before_it() -> None:
    first = change(FEDERATION, "add", entry("b4"))
    second = change(FEDERATION, "remove", FEDERATION.brokers[0], number=2)
    changes = [(3, first), (5, second)]
    sizes = [len(roster_for(FEDERATION, changes, server_round).brokers) for server_round in (3, 4, 5, 6)]
    assert sizes == [3, 4, 4, 3]
    with pytest.raises(VerificationError, match="change 1"):
        with_changes(FEDERATION, [second])


def test_changes_survive_on_disk(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert load_changes(tmp_path) == []
    made = [change(FEDERATION, "add", entry("b4"))]
    save_changes(tmp_path, made)
    assert load_changes(tmp_path) == made


def test_a_removed_broker_ends_and_the_others_go_on() -> None:
    joined = started()
    signed = change(joined.federation, "remove", known(joined, "b3"))
    assert ask(joined, signed) == []
    joined.contribute()
    assert joined.rounds() == {3}
    assert joined.brokers["b3"].core._stopped
    joined.kill("b3")
    for name in ("b1", "b2"):
        core = joined.brokers[name].core
        assert [one.name for one in core.federation.brokers] == ["b1", "b2"]
        assert core.head.changes == ((3, signed),)
    joined.join_clients()
    joined.contribute()
    assert joined.rounds() == {4} and len(joined.model_hashes()) == 1
    commit = joined.brokers["b1"].disk.commits[4]
    assert check_votes(joined.brokers["b1"].core.federation, commit) >= 0


def test_votes_count_by_the_roster_of_their_round() -> None:
    joined = started()
    ask(joined, change(joined.federation, "remove", known(joined, "b3")))
    joined.contribute()
    commit = joined.brokers["b1"].disk.commits[3]
    body = decode(Body, commit.body)
    assert body.change is not None
    assert check_votes(joined.federation, commit) >= 0
    without = [vote for vote in commit.votes if vote.node_id != identity("b3").node_id]
    after = joined.brokers["b1"].core.federation
    if len(without) < len(commit.votes):
        with pytest.raises(VerificationError):
            check_votes(after, commit)
    with pytest.raises(VerificationError):
        check_votes(after, Commit(commit.body, tuple(without[:1])))


def test_an_added_broker_catches_up_and_then_its_vote_counts() -> None:
    joined = started()
    newcomer = entry("b4")
    assert ask(joined, change(joined.federation, "add", newcomer), "b2") == []
    joined.contribute()
    assert joined.rounds() == {3}
    broker = joined.brokers["b4"] = JoinedBroker(joined, "b4")
    joined.by_id[broker.identity.node_id] = broker
    joined.restart("b4")
    joined.pass_time(6.0)
    assert joined.heads()["b4"].server_round == 3
    assert joined.brokers["b4"].core.federation.majority == 3
    joined.kill("b1")
    joined.join_clients()
    joined.contribute()
    joined.pass_time(10.0)
    assert joined.rounds() == {4} and len(joined.model_hashes()) == 1
    votes = {vote.node_id for vote in joined.brokers["b2"].disk.commits[4].votes}
    assert broker.identity.node_id in votes


def test_a_readdressed_broker_keeps_its_place() -> None:
    joined = started()
    moved = msgspec.structs.replace(known(joined, "b2"), client_address="tcp://new:1", peer_address="tcp://new:2")
    assert ask(joined, change(joined.federation, "readdress", moved)) == []
    joined.contribute()
    assert {broker.core.federation.broker_by_id[identity("b2").node_id] for broker in joined.brokers.values()} == {
        moved
    }
    joined.contribute()
    assert joined.rounds() == {4}


def test_a_wrong_change_is_refused_by_name_and_rounds_go_on() -> None:
    joined = started()
    assert ask(joined, change(joined.federation, "add", entry("b4"), by=identity("c1"))) == [
        "it is not signed by this federation's operator"
    ]
    joined.contribute()
    assert joined.rounds() == {3} and joined.heads()["b1"].changes == ()


def test_one_change_at_a_time_and_the_next_one_after_it() -> None:
    joined = started()
    first = change(joined.federation, "add", entry("b4"))
    assert ask(joined, first) == []
    assert ask(joined, first) == []  # said again until it is committed
    assert ask(joined, change(joined.federation, "add", entry("b5"), number=2)) == [
        "it is change 2, and 0 were committed"
    ]
    joined.contribute()
    assert roster_after(joined.federation.brokers, decode(RosterChange, first.payload)) == joined.heads()["b1"].brokers
    assert ask(joined, first) == []
    second = change(joined.federation, "remove", entry("b4"), number=2)
    assert ask(joined, second) == []
    joined.contribute()
    joined.pass_time(10.0)
    assert [at for at, _ in joined.heads()["b1"].changes] == [3, 4]
