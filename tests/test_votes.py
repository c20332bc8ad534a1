"""The votes under a commit: a majority of the roster, each once, for this body, in one view."""

import msgspec
import pytest

from ravnest_fed.decree import check_votes
from ravnest_fed.errors import VerificationError
from ravnest_fed.facts import Commit, Vote, body_hash, encode, sign
from ravnest_fed.identity import Signed
from tests.building import contribution, decide, identity, tiny, vote

ONE = tiny(brokers=5)
REPLICA = ONE.replica()
DECIDED = decide(ONE, REPLICA, [contribution(ONE, REPLICA.head, 0)], view=2)
RAW = DECIDED.raw
OTHER = encode(msgspec.structs.replace(DECIDED.body, stop="another"))


def votes(*brokers: int, view: int = 2) -> list[Signed]:
    return [vote(ONE, broker, RAW, 1, view) for broker in brokers]


def refused(cast: list[Signed], finding: str) -> None:
    with pytest.raises(VerificationError, match=finding) as caught:
        check_votes(ONE.federation, Commit(RAW, tuple(cast)))
    assert caught.value.what.startswith("round 1: ")


def test_the_votes_of_any_majority_are_accepted_and_give_their_view() -> None:
    assert check_votes(ONE.federation, DECIDED.commit) == 2
    for view in (0, 7):
        assert check_votes(ONE.federation, Commit(RAW, tuple(votes(4, 2, 1, view=view)))) == view
    assert check_votes(ONE.federation, Commit(RAW, tuple(votes(0, 1, 2, 3, 4)))) == 2


@pytest.mark.parametrize(("brokers", "finding"), [((), "0 of 5"), ((0,), "1 of 5"), ((3, 4), "2 of 5")])
def test_a_minority_is_refused(brokers: tuple[int, ...], finding: str) -> None:
    refused(votes(*brokers), f"{finding} brokers voted, a majority is 3")


def test_a_vote_counts_once() -> None:
    refused(votes(0, 1, 1, 0, 1), "2 of 5 brokers voted")


def test_votes_of_two_views_are_refused() -> None:
    refused([*votes(0, 1), *votes(2, view=3)], "different views")
    refused([*votes(0, 1, 2), *votes(0, view=3)], "different views")


def test_the_votes_of_strangers_members_and_the_operator_are_refused() -> None:
    fact = Vote(ONE.federation.fingerprint, 1, 2, body_hash(RAW))
    for node in (identity("stranger"), ONE.members[0], ONE.operator):
        refused([*votes(0, 1, 2), sign(node, fact)], "the vote of .* has a wrong signature")


def test_a_vote_under_another_name_or_domain_is_refused() -> None:
    good = votes(0)[0]
    for wrong in (
        msgspec.structs.replace(good, node_id=ONE.brokers[3].node_id),
        msgspec.structs.replace(good, signature=b"\1" * 64),
        msgspec.structs.replace(good, payload=votes(0, view=1)[0].payload),
        ONE.brokers[0].sign("Receipt", good.payload),
        ONE.brokers[0].sign("Vote", b"no vote"),
    ):
        refused([*votes(1, 2, 4), wrong], "has a wrong signature")


def test_a_vote_of_another_federation_is_refused() -> None:
    refused([*votes(1, 2, 3), vote(ONE, 0, RAW, 1, 2, federation=b"\1" * 32)], "the vote of b1 has a wrong signature")


def test_a_vote_for_another_body_or_round_is_refused() -> None:
    refused([*votes(1, 2, 3), vote(ONE, 0, OTHER, 1, 2)], "the vote of b1 is for another body")
    refused([*votes(1, 2, 3), vote(ONE, 0, RAW, 2, 2)], "the vote of b1 is for another body")


def test_votes_do_not_carry_over_to_another_body() -> None:
    with pytest.raises(VerificationError, match="is for another body"):
        check_votes(ONE.federation, Commit(OTHER, DECIDED.commit.votes))
