"""What a client owes the model: nothing is lost or sent twice, whatever is counted and whenever the client is killed."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients import effects as fx
from clients import events as ev
from clients.outbox import FILE_NAME, Outbox
from clients.residual import ErrorFeedback, Standing
from ravnest_fed import codecs
from ravnest_fed.encoding import encode_delta
from ravnest_fed.facts import Manifest, WorkOrder, decode, signed_hash
from ravnest_fed.head import CountedSequences, Head
from ravnest_fed.messages import Offer, Reason, Refused
from ravnest_fed.parameters import ModelState
from tests.building import delta, tiny, tiny_schema, work_order
from tests.joining import ROUND_0, Client, only, sent

SCHEMA = tiny_schema(2)
ONES = {name: tiny(settings={"up": name, "warmup_rounds": "0"}, schema=SCHEMA) for name in ("int8", "sign", "topk64")}
Shards = tuple[bytes, ...]


class Killed(BaseException):
    """The process is gone."""


@contextmanager
def killed_at(number: int) -> Iterator[list[str]]:
    """Vanish at the `number`-th step that changes the disk (counted from 0), before or half-way through it."""
    steps: list[str] = []

    def step(name: str, original: Callable[..., object], half: bool = False) -> Callable[..., object]:
        def called(*arguments: object, **options: object) -> object:
            steps.append(name)
            if len(steps) > number:
                if half and len(steps) == number + 1:
                    original(arguments[0], bytes(arguments[1])[: len(bytes(arguments[1])) // 2])  # type: ignore[call-overload]
                raise Killed
            return original(*arguments, **options)

        return called

    with (
        mock.patch.object(Path, "write_bytes", step("write", Path.write_bytes, half=True)),
        mock.patch.object(Path, "replace", step("rename", Path.replace)),
        mock.patch.object(Path, "unlink", step("unlink", Path.unlink)),
        mock.patch("os.fsync", step("sync", lambda descriptor: None)),
    ):
        yield steps


class Member:
    """One client over many lives: the real session, outbox and encoding, between made-up brokers and training."""

    def __init__(self, folder: Path, codec: str) -> None:
        self.folder = folder
        self.one = ONES[codec]
        self.codec = codecs.get(codec)
        self.heads: list[Head] = [ROUND_0]
        self.sums: dict[Shards, tuple[np.ndarray, np.ndarray]] = {}
        """By payload: the true delta, and what the payload decodes to."""
        self.signed: dict[Shards, None] = {}
        self.offered: dict[int, tuple[int, Shards]] = {}
        self.counted: list[Shards] = []
        self.seed = 0
        self.live()

    def live(self) -> None:
        """Start, or start again, and follow the log to its end."""
        self.outbox = Outbox(self.folder, self.one.federation.fingerprint, self.one.members[0].node_id)
        self.note_signed()
        self.client = Client(self.one, kept=self.outbox.standing)
        self.carry(self.client.join(len(self.heads) - 1))
        for head in self.heads[1:]:
            self.carry(self.client.commit(head))

    def note_signed(self) -> None:
        offer = self.outbox.standing.offer
        if offer is not None:
            self.signed[tuple(ref.hash for ref in offer.shards)] = None

    def carry(self, effects: list[fx.Effect]) -> None:
        for effect in effects:
            match effect:
                case fx.Keep(offer, residual):
                    self.outbox.keep(offer, residual)
                    self.note_signed()
                case fx.Forget(counted):
                    self.outbox.forget(counted)
                case fx.Train(order):
                    self.carry(self.client.do(self.trained(order)))
                case fx.Send(_, Offer(signed, shards)):
                    manifest = decode(Manifest, signed.payload)
                    assert all(self.outbox.read(ref.hash) for ref in shards)
                    self.offered[manifest.base_round] = manifest.sequence, tuple(ref.hash for ref in shards)

    def trained(self, order: WorkOrder) -> ev.Trained:
        self.seed += 1
        made = delta(SCHEMA, self.seed)
        outbox = self.outbox
        feedback = None
        if self.codec.feedback_decay is not None:
            feedback = ErrorFeedback(SCHEMA, self.codec, outbox.standing, outbox.read, outbox.put)
        encoded = encode_delta(SCHEMA, order.codec, made, feedback)
        refs = tuple(outbox.put(payload) for payload in encoded.payloads)
        sent_values = np.concatenate([self.codec.decode(payload, 4096) for payload in encoded.payloads[:2]])
        self.sums[tuple(ref.hash for ref in refs)] = made.vector[: SCHEMA.parameter_stop], sent_values
        residual = tuple(feedback.left) if feedback else None
        return ev.Trained(order.base_round, refs, encoded.norm, encoded.max_abs, 8, 2, {}, 0.1, residual)

    def round(self, counts: bool) -> None:
        """A round: work, offer, and the commit, which counts this client's contribution or not."""
        base = self.heads[-1]
        self.carry(self.client.order(work_order(self.one, base, 0)))
        table = dict(base.counted)
        if counts:
            sequence, shards = self.offered[base.server_round]
            me = self.one.members[0].node_id
            table[me] = table.get(me, CountedSequences(0)).with_sequence(sequence)
            self.counted.append(shards)
        number = base.server_round + 1
        self.heads.append(
            msgspec.structs.replace(base, server_round=number, commit_hash=bytes([number]) * 32, counted=table)
        )
        self.carry(self.client.commit(self.heads[-1]))

    def owed(self) -> np.ndarray:
        """The residual, with what was returned to it, in float64."""
        feedback = ErrorFeedback(SCHEMA, self.codec, self.outbox.standing, self.outbox.read, self.outbox.put)
        zero = np.zeros(4096, np.float32)
        found = [feedback.wanted(shard, zero) for shard in SCHEMA.shards if shard.kind == "parameters"]
        assert not feedback.lost
        return np.concatenate(found).astype(np.float64) / (self.codec.feedback_decay or 1.0)

    def nothing_is_lost(self) -> None:
        """With a decay of 1: all that was counted, and what is owed, make up all deltas that were signed."""
        true = sum((self.sums[shards][0].astype(np.float64) for shards in self.signed), np.zeros(8192))
        counted = sum((self.sums[shards][1].astype(np.float64) for shards in self.counted), np.zeros(8192))
        real = slice(0, SCHEMA.parameter_count)
        assert np.allclose((counted + self.owed())[real], true[real], atol=1e-7 + 2e-6 * np.abs(true).max())


ROUNDS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=8)


@given(rounds=ROUNDS)
@settings(max_examples=25, deadline=None)
def test_what_was_counted_and_what_is_owed_make_up_every_delta(rounds: list[tuple[bool, bool]]) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"):
        member = Member(Path(folder), "sign")
        for counts, restarts in rounds:
            member.round(counts)
            if restarts:
                member.live()
        member.nothing_is_lost()
        assert len(member.signed) == len(rounds) and member.outbox.standing.offer is None


@given(rounds=ROUNDS)
@settings(max_examples=15, deadline=None)
def test_the_residual_decays_once_a_contribution(rounds: list[tuple[bool, bool]]) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"):
        member = Member(Path(folder), "topk64")
        owed = np.zeros(SCHEMA.parameter_stop)
        for number, (counts, restarts) in enumerate(rounds):
            member.round(counts)
            if restarts:
                member.live()
            true, payload = list(member.sums.values())[number]
            owed = owed * np.float64(np.float32(0.95)) + true
            if counts:
                owed -= payload
        assert np.allclose(member.owed()[: SCHEMA.parameter_count], owed[: SCHEMA.parameter_count], atol=1e-7)


@pytest.mark.parametrize("codec", ["sign", "int8"])
def test_a_kill_at_any_step_loses_nothing_and_returns_nothing_twice(codec: str, tmp_path: Path) -> None:
    plan = [True, False, False, True]

    def life(folder: Path, number: int) -> tuple[Member, bool]:
        with mock.patch("os.fsync"):
            member = Member(folder, codec)
        killed = False
        for counts in plan:
            while True:
                server_round = len(member.heads)
                try:
                    with killed_at(number if not killed else 10**9) as steps:
                        if len(member.heads) == server_round:
                            member.round(counts)
                    number -= len(steps)
                    break
                except Killed:
                    killed = True
                    with mock.patch("os.fsync"):
                        member.live()
                    if len(member.heads) > server_round:
                        break
        return member, killed

    number = 0
    while True:
        member, killed = life(tmp_path / str(number), number)
        if codec == "sign":
            member.nothing_is_lost()
            assert len(member.signed) == len(plan)
        assert member.outbox.standing.offer is None and len(member.counted) == 2
        left = {file.name for file in (tmp_path / str(number) / "blobs").iterdir()}
        assert left == {blob.hex() for blob in member.outbox.standing.blobs}
        if not killed:
            break
        number += 1
    assert number > 40


def test_nothing_is_kept_under_a_codec_that_loses_little(tmp_path: Path) -> None:
    member = Member(tmp_path, "int8")
    member.round(False)
    assert member.outbox.standing == Standing(member.one.federation.fingerprint, member.one.members[0].node_id)
    assert not list((tmp_path / "blobs").iterdir()) and not (tmp_path / FILE_NAME).exists()


@pytest.mark.parametrize("other", ["federation", "client"])
def test_a_residual_is_bound_to_its_federation_and_client(other: str, tmp_path: Path) -> None:
    member = Member(tmp_path, "sign")
    member.round(True)
    assert member.outbox.standing.residual
    federation = b"x" * 32 if other == "federation" else member.one.federation.fingerprint
    client = member.one.members[1 if other == "client" else 0].node_id
    assert Outbox(tmp_path, federation, client).standing == Standing(federation, client)


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_residual_that_cannot_be_read_counts_as_zeros_and_is_told_of(damage: str, tmp_path: Path) -> None:
    member = Member(tmp_path, "sign")
    member.round(True)
    file = tmp_path / "blobs" / member.outbox.standing.residual[1].hash.hex()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(bytes(len(file.read_bytes())))
    standing = member.outbox.standing
    feedback = ErrorFeedback(SCHEMA, member.codec, standing, member.outbox.read, member.outbox.put)
    ones = np.ones(4096, np.float32)
    assert (feedback.wanted(SCHEMA.shards[0], ones) != ones).any() and feedback.lost == []
    assert np.array_equal(feedback.wanted(SCHEMA.shards[1], ones), ones) and feedback.lost == [1]


def test_padding_is_owed_to_nobody(tmp_path: Path) -> None:
    member = Member(tmp_path, "sign")
    member.round(True)
    assert member.sums[member.counted[0]][1][SCHEMA.parameter_count :].any()
    assert not member.owed()[SCHEMA.parameter_count :].any()


def test_a_payload_that_was_signed_twice_is_owed_again_only_if_neither_was_counted(tmp_path: Path) -> None:
    for counts in (0, 1, None):
        member = Member(tmp_path / str(counts), "sign")
        member.carry(member.client.order(work_order(member.one, ROUND_0, 0)))
        (first,) = sent(member.client.all, Offer)
        refusal = Refused(Reason.REPLAYED, "used before", signed_hash(first.manifest))
        member.carry(member.client.hear(refusal))
        member.live()
        sequences = member.outbox.standing.sequences
        assert len(sequences) == 2 and member.outbox.standing.residual
        table = {} if counts is None else {member.client.me: CountedSequences(sequences[counts])}
        if counts is not None:
            member.counted.append(member.offered[0][1])
        head = msgspec.structs.replace(ROUND_0, server_round=1, commit_hash=b"1" * 32, counted=table)
        effects = member.client.commit(head)
        assert only(effects, fx.Forget) == [fx.Forget(counted=counts is not None)]
        member.carry(effects)
        member.nothing_is_lost()


def test_an_older_base_is_not_worked_on_before_the_fate_of_what_was_signed_is_known(tmp_path: Path) -> None:
    member = Member(tmp_path, "sign")
    member.round(True)
    member.carry(member.client.order(work_order(member.one, member.heads[1], 0)))
    outbox = Outbox(tmp_path, member.one.federation.fingerprint, member.one.members[0].node_id)
    again = Client(member.one, kept=outbox.standing)
    again.join()
    assert not only(again.order(work_order(member.one, ROUND_0, 0)), fx.Train)


def test_a_shard_that_cannot_be_encoded_leaves_what_is_owed_as_it_was(tmp_path: Path) -> None:
    member = Member(tmp_path, "sign")
    member.round(True)
    before, owed = member.outbox.standing, member.owed()
    feedback = ErrorFeedback(SCHEMA, member.codec, before, member.outbox.read, member.outbox.put)
    broken = ModelState.zeros(SCHEMA)
    broken.vector[5000] = np.inf
    with pytest.raises(Exception, match="not finite"):
        encode_delta(SCHEMA, "sign", broken, feedback)
    assert member.outbox.standing == before and np.array_equal(member.owed(), owed)
