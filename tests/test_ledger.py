"""The ledger: what it was told is there after it was opened again, and only for its own federation."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from ravnest_fed.errors import LedgerError, WrongFederation
from ravnest_fed.facts import decode, encode, signed_hash
from ravnest_fed.identity import Signed
from ravnest_fed.ledger import FILE_NAME, Admitted, Ledger, VoteRecord
from tests.building import Contribution, Decided, contribution, decide, evaluation, row_of, tiny

ONE = tiny()
FINGERPRINT = ONE.federation.fingerprint


def decided_rounds(count: int) -> Iterator[tuple[Decided, list[Contribution]]]:
    replica = ONE.replica()
    for _ in range(count):
        offers = [contribution(ONE, replica.head, member) for member in (0, 1)]
        decided = decide(ONE, replica, offers)
        replica.fold(decided.body, decided.raw, decided.read_update)
        yield decided, offers


ROUNDS = list(decided_rounds(3))


def filled(folder: Path) -> Ledger:
    ledger = Ledger(folder, FINGERPRINT)
    for decided, offers in ROUNDS:
        ledger.save_commit(decided.commit, row_of(decided, offers))
    return ledger


def reopened(ledger: Ledger) -> Ledger:
    ledger.close()
    return Ledger(ledger.path.parent, FINGERPRINT)


def tamper(folder: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(folder / FILE_NAME) as database:
        database.execute(statement, values)
    database.close()


def test_a_new_ledger_is_empty(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, FINGERPRINT)
    assert ledger.last_round() == 0
    assert ledger.commit(1) is None
    assert list(ledger.commits()) == []
    assert ledger.rows(0) == ()
    assert ledger.vote_record(1) == VoteRecord(0, -1, None)
    assert ledger.contributions(0) == []
    assert ledger.highest_sequence("anybody") == 0
    assert (ledger.evaluations(0), ledger.evaluated(), ledger.traffic()) == ([], {}, {})


def test_the_chain_survives_reopening(tmp_path: Path) -> None:
    ledger = reopened(filled(tmp_path))
    assert ledger.last_round() == 3
    assert list(ledger.commits()) == [(decided.commit, decided.body) for decided, _ in ROUNDS]
    assert [body.server_round for _, body in ledger.commits(after=1)] == [2, 3]
    assert ledger.commit(2) == ROUNDS[1][0].commit
    assert ledger.rows(1) == tuple(row_of(*each) for each in ROUNDS[1:])
    assert [row.server_round for row in ledger.rows(0, most=2)] == [1, 2]


def test_a_commit_once_saved_is_not_replaced(tmp_path: Path) -> None:
    ledger = filled(tmp_path)
    (first, offers), (second, _) = ROUNDS[:2]
    ledger.save_commit(second.commit, row_of(first, offers))
    assert ledger.commit(1) == first.commit


def test_bytes_down_are_filled_in_later(tmp_path: Path) -> None:
    ledger = filled(tmp_path)
    ledger.save_bytes_down(2, 12345)
    ledger.save_bytes_down(9, 1)
    assert [row.bytes_down for row in reopened(ledger).rows(0)] == [0, 12345, 0]


def test_a_gap_in_the_chain_is_named(tmp_path: Path) -> None:
    filled(tmp_path).close()
    tamper(tmp_path, "delete from commits where server_round = 2")
    walk = Ledger(tmp_path, FINGERPRINT).commits()
    assert next(walk)[1].server_round == 1
    with pytest.raises(LedgerError, match="misses round 2"):
        next(walk)


def test_a_round_in_the_place_of_another_is_named(tmp_path: Path) -> None:
    filled(tmp_path).close()
    tamper(tmp_path, "update commits set record = ? where server_round = 2", encode(ROUNDS[2][0].commit))
    with pytest.raises(LedgerError, match="another round as round 2"):
        list(Ledger(tmp_path, FINGERPRINT).commits())


def test_a_ledger_of_another_federation_is_refused(tmp_path: Path) -> None:
    filled(tmp_path).close()
    with pytest.raises(WrongFederation, match="another federation"):
        Ledger(tmp_path, tiny(members=5).federation.fingerprint)
    assert Ledger(tmp_path, FINGERPRINT).last_round() == 3


def test_a_missing_ledger_is_not_made_unless_asked_for(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="no ledger"):
        Ledger(tmp_path, FINGERPRINT, create=False)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(LedgerError, match=FILE_NAME):
        Ledger(tmp_path, FINGERPRINT)


def test_promises_and_votes_survive_reopening(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, FINGERPRINT)
    ledger.save_promise(1, 4)
    assert ledger.vote_record(1) == VoteRecord(4, -1, None)
    ledger.save_vote(1, 4, b"body")
    ledger.save_promise(1, 6)
    ledger.save_vote(2, 3, b"later")
    ledger = reopened(ledger)
    assert ledger.vote_record(1) == VoteRecord(6, 4, b"body")
    assert ledger.vote_record(2) == VoteRecord(3, 3, b"later")
    ledger.save_vote(1, 7, b"other")
    assert reopened(ledger).vote_record(1) == VoteRecord(7, 7, b"other")


def test_a_commit_forgets_the_votes_up_to_its_round_only(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, FINGERPRINT)
    for server_round in (1, 2):
        ledger.save_promise(server_round, 5)
        ledger.save_vote(server_round, 5, b"body")
    decided, offers = ROUNDS[0]
    ledger.save_commit(decided.commit, row_of(decided, offers))
    ledger = reopened(ledger)
    assert ledger.vote_record(1) == VoteRecord(0, -1, None)
    assert ledger.vote_record(2) == VoteRecord(5, 5, b"body")


def test_contributions_are_kept_once_and_found_by_their_base(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, FINGERPRINT)
    (_, first), (_, second) = ROUNDS[:2]
    for each in (*first, first[0], second[0]):
        ledger.save_contribution(each.signed, each.manifest, each.shards)
    ledger = reopened(ledger)
    key = lambda admitted: admitted.manifest.node_id  # noqa: E731
    everything = [Admitted(o.signed, o.shards) for o in (*first, second[0])]
    assert sorted(ledger.contributions(0), key=key) == sorted(everything, key=key)
    assert ledger.contributions(1) == [Admitted(second[0].signed, second[0].shards)]
    assert ledger.contributions(2) == []


def test_dropping_old_contributions_names_the_blobs_still_needed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, FINGERPRINT)
    (_, first), (_, second) = ROUNDS[:2]
    for each in (*first, *second):
        ledger.save_contribution(each.signed, each.manifest, each.shards)
    assert ledger.drop_contributions(before_base=1) == {ref.hash for each in second for ref in each.shards}
    ledger = reopened(ledger)
    assert len(ledger.contributions(0)) == len(ledger.contributions(1)) == 2
    counted, left = second
    still = ledger.drop_contributions(before_base=1, counted=[signed_hash(counted.signed)])
    assert still == {ref.hash for ref in left.shards}
    assert ledger.drop_contributions(before_base=2) == set()


def test_the_highest_sequence_never_falls(tmp_path: Path) -> None:
    ledger, head = Ledger(tmp_path, FINGERPRINT), ONE.replica().head
    for sequence in (7, 3):
        offer = contribution(ONE, head, 0, sequence=sequence)
        ledger.save_contribution(offer.signed, offer.manifest, offer.shards)
    ledger.drop_contributions(before_base=9)
    ledger = reopened(ledger)
    assert ledger.highest_sequence(ONE.members[0].node_id) == 7
    assert ledger.highest_sequence(ONE.members[1].node_id) == 0


def test_both_manifests_of_an_equivocation_are_kept(tmp_path: Path) -> None:
    ledger, head = Ledger(tmp_path, FINGERPRINT), ONE.replica().head
    first, second = (contribution(ONE, head, 0, sequence=sequence).signed for sequence in (1, 2))
    ledger.save_equivocation(ONE.members[0].node_id, 0, first, second)
    ledger.close()
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        rows = database.execute("select client, base_round, first, second from equivocations").fetchall()
    database.close()
    assert [(row[0], row[1]) for row in rows] == [(ONE.members[0].node_id, 0)]
    assert [decode(Signed, raw) for raw in rows[0][2:]] == [first, second]


def test_evaluations_are_kept_by_round_and_client(tmp_path: Path) -> None:
    ledger, head = Ledger(tmp_path, FINGERPRINT), ONE.replica().head
    ids = [member.node_id for member in ONE.members]
    signed = {member: evaluation(ONE, head, member, {"loss": 1.0 + member}) for member in (0, 1)}
    for member in (0, 1):
        ledger.save_evaluation(0, ids[member], evaluation(ONE, head, member, {"loss": 9.0}))
        ledger.save_evaluation(0, ids[member], signed[member])
    ledger.save_evaluation(4, ids[1], signed[1])
    ledger = reopened(ledger)
    assert ledger.evaluations(0) == sorted(signed.values(), key=lambda one: one.node_id)
    assert ledger.evaluations(4) == [signed[1]]
    assert ledger.evaluations(1) == []
    assert ledger.evaluated() == {ids[0]: 0, ids[1]: 4}


def test_traffic_is_kept_as_last_told(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, FINGERPRINT)
    ledger.save_traffic({"a": (1, 2), "b": (3, 2**40)})
    ledger.save_traffic({"a": (10, 20), "c": (5, 6)})
    ledger.save_traffic({})
    assert reopened(ledger).traffic() == {"a": (10, 20), "b": (3, 2**40), "c": (5, 6)}


def test_blobs_and_spool_lie_apart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, FINGERPRINT)
    kept, spooled = ledger.blobs.put(b"kept"), ledger.spool.put(b"spooled")
    ledger = reopened(ledger)
    assert ledger.blobs.has(kept.hash)
    assert not ledger.spool.has(kept.hash)
    assert ledger.spool.read(spooled.hash) == b"spooled"
