"""The broker's calculations: what an inspection finds, means that do not depend on order, previews that folding keeps."""

from collections.abc import Mapping
from itertools import permutations
from typing import Any

import msgspec
import numpy as np
import pytest

from brokers.effects import Accumulate, Examine, Inspect, Preview, Reduce
from brokers.workbench import Workbench
from ravnest_fed import codecs
from ravnest_fed.aggregation.weighting import Weight
from ravnest_fed.blobs import MemoryBlobs
from ravnest_fed.codecs.base import HEADER
from ravnest_fed.codecs.counters import encode_counters
from ravnest_fed.decree import count, reduction_of
from ravnest_fed.errors import LedgerError
from ravnest_fed.facts import BlobRef, Commit, Reduction, reduction_hash
from ravnest_fed.messages import Reason
from ravnest_fed.replica import Replica
from tests.building import Contribution, Decided, Tiny, contribution, decide, delta, tiny

SETTINGS = {"up": "fp32", "down": "int8", "strategy.name": "fedavgm", "momentum": "0.5", "warmup_rounds": "0"}
BY_EXAMPLES = {"weighting": "examples", "normalization": "none"}
PARAMETERS, BUFFERS, COUNTERS = 0, 3, 4
"""Indices of the first shard of each kind."""


class Bench:
    """A workbench at the head of a federation that talks in fp32, with what it reads and writes."""

    def __init__(self, codec: str = "fp32", settings: Mapping[str, str] | None = None) -> None:
        self.one: Tiny = tiny(settings={**SETTINGS, "up": codec, **(settings or {})})
        self.replica: Replica = self.one.replica()
        self.store, self.spool = MemoryBlobs(), MemoryBlobs()
        self.bench = Workbench(self.replica, self.store, self.spool)

    def contribution(self, member: int = 0, **changes: Any) -> Contribution:
        made = contribution(self.one, self.replica.head, member, **changes)
        for shard in made.payload.shards:
            self.spool.put(shard)
        return made

    def inspect(self, made: Contribution, **replaced: bytes) -> tuple[str, str]:
        """The finding on a contribution some of whose payloads (`s0` for shard 0) are replaced."""
        shards = list(made.shards)
        for name, payload in replaced.items():
            shards[int(name[1:])] = self.spool.put(payload)
        found = self.bench.inspect(Inspect(made.manifest_hash, made.manifest, tuple(shards)))
        assert found.manifest_hash == made.manifest_hash and bool(found.reason) == bool(found.text)
        return found.reason, found.text

    def reduction(self, made: list[Contribution]) -> Reduction:
        head, federation = self.replica.head, self.one.federation
        counted = [count(federation, head, one.manifest, one.manifest_hash) for one in made]
        return reduction_of(federation, head, counted)

    def accumulate(self, made: Contribution, shard: int, scale_bits: int, server_round: int = 1) -> None:
        one = count(self.one.federation, self.replica.head, made.manifest, made.manifest_hash)
        weight = Weight(one.weight, one.share)
        task = Accumulate(server_round, shard, scale_bits, made.manifest_hash, made.shards[shard], weight)
        self.bench.accumulate(task)

    def reduce(self, made: list[Contribution], shard: int) -> bytes:
        reduction = self.reduction(made)
        by_hash = {one.manifest_hash: one.shards[shard] for one in made}
        refs = tuple(by_hash[one.manifest_hash] for one in reduction.counted)
        reduced = self.bench.reduce(Reduce(reduction, reduction_hash(reduction), shard, refs))
        assert (reduced.reduction_hash, reduced.shard) == (reduction_hash(reduction), shard)
        return self.store.read(reduced.update.hash)

    def decided(self, members: int = 3) -> Decided:
        """A committed round whose blobs this workbench holds."""
        decided = decide(self.one, self.replica, [self.contribution(member) for member in range(members)])
        for blob in (decided.evidence, *decided.updates):
            self.store.put(blob)
        return decided


def with_value(payload: bytes, index: int, bits: int) -> bytes:
    """An fp32 payload with the bits of one value replaced."""
    start = HEADER.size + 4 * index
    return payload[:start] + bits.to_bytes(4, "little") + payload[start + 4 :]


def test_a_sound_contribution_passes() -> None:
    for codec in codecs.names():
        bench = Bench(codec)
        assert bench.inspect(bench.contribution()) == ("", "")


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00001, 0x7F800001, 0x7F800000, 0xFF800000])
@pytest.mark.parametrize("shard", [PARAMETERS, PARAMETERS + 2, BUFFERS])
def test_nan_and_infinity_in_a_payload_are_found(bits: int, shard: int) -> None:
    bench = Bench()
    made = bench.contribution()
    for index in (0, 4095):
        bad = with_value(made.payload.shards[shard], index, bits)
        assert bench.inspect(made, **{f"s{shard}": bad})[0] == Reason.NOT_FINITE


@pytest.mark.parametrize("shard", range(5))
def test_a_payload_that_is_cut_longer_or_has_another_header_is_damaged(shard: int) -> None:
    bench = Bench()
    made = bench.contribution()
    good = made.payload.shards[shard]
    for bad in (good[:-1], good + b"\0", b"XX" + good[2:], good[:4] + b"\1\0\0\0" + good[8:], b"\0", good[:8]):
        assert bench.inspect(made, **{f"s{shard}": bad})[0] == Reason.DAMAGED_PAYLOAD


def test_a_payload_of_another_codec_is_damaged() -> None:
    bench = Bench()
    made = bench.contribution()
    values = codecs.get("fp32").decode(made.payload.shards[0], 4096)
    assert bench.inspect(made, s0=codecs.get("int8").encode(values))[0] == Reason.DAMAGED_PAYLOAD


@pytest.mark.parametrize("grown", [-1, 3, 2**40])
def test_counters_that_shrink_or_grow_by_more_than_the_steps_done_are_damaged(grown: int) -> None:
    bench = Bench()
    made = bench.contribution()
    head = encode_counters(np.zeros(2, np.int64))[: HEADER.size]
    bad = head + np.array([grown, 0], "<i8").tobytes()
    assert bench.inspect(made, s4=bad)[0] == Reason.DAMAGED_PAYLOAD
    assert bench.inspect(made, s4=head + np.array([2, 0], "<i8").tobytes()) == ("", "")


def test_a_buffer_past_what_can_be_summed_is_out_of_range() -> None:
    bench = Bench()
    made = bench.contribution()
    bad = with_value(made.payload.shards[BUFFERS], 0, int(np.float32(2.0**40).view(np.uint32)))
    assert bench.inspect(made, s3=bad)[0] == Reason.OUT_OF_RANGE


@pytest.mark.parametrize("field", ["norm", "max_abs"])
def test_a_declared_norm_or_range_that_is_off_by_the_least_bit_is_found(field: str) -> None:
    bench = Bench()
    sound = bench.contribution()
    for towards in (0.0, np.inf):
        lie = float(np.nextafter(getattr(sound.manifest, field), towards))
        assert bench.inspect(bench.contribution(**{field: lie}))[0] == Reason.WRONG_NORM


def test_a_payload_that_another_delta_was_declared_for_is_found() -> None:
    bench = Bench()
    made, other = bench.contribution(0), bench.contribution(1)
    assert bench.inspect(made, s0=other.payload.shards[0])[0] == Reason.WRONG_NORM


@pytest.mark.parametrize("shard", [PARAMETERS, BUFFERS, COUNTERS])
def test_a_mean_has_the_same_bytes_for_every_order_of_arrival(shard: int) -> None:
    wanted = set()
    for order in permutations(range(4)):
        bench = Bench()
        made = [bench.contribution(member, num_examples=2 * member + 1) for member in range(4)]
        scale = bench.reduction(made).scale_bits
        for member in order[:2]:  # the others are read at the end
            bench.accumulate(made[member], shard, scale)
        wanted.add(bench.reduce(made, shard))
    assert len(wanted) == 1


@pytest.mark.parametrize("shard", [PARAMETERS, BUFFERS, COUNTERS])
def test_a_contribution_that_the_plan_leaves_out_leaves_no_trace(shard: int) -> None:
    bench, plain = Bench(), Bench()
    made = [bench.contribution(member) for member in range(4)]
    scale = bench.reduction(made[:3]).scale_bits
    for one in reversed(made):
        bench.accumulate(one, shard, scale)
    assert bench.reduce(made[:3], shard) == plain.reduce([plain.contribution(member) for member in range(3)], shard)
    assert bench.reduce(made, shard) == plain.reduce([plain.contribution(member) for member in range(4)], shard)
    assert bench.reduce(made[2:], shard) == plain.reduce([plain.contribution(member) for member in (2, 3)], shard)


def test_a_mean_survives_a_left_out_payload_that_is_gone() -> None:
    bench, plain = Bench(), Bench()
    made = [bench.contribution(member) for member in range(3)]
    for one in made:
        bench.accumulate(one, 0, bench.reduction(made[:2]).scale_bits)
    bench.spool.remove(made[2].shards[0].hash)
    assert bench.reduce(made[:2], 0) == plain.reduce([plain.contribution(member) for member in range(2)], 0)


@pytest.mark.parametrize(("server_round", "finer"), [(1, -20), (9, -20), (9, 0)])
def test_sums_of_another_round_or_scale_are_not_carried_over(server_round: int, finer: int) -> None:
    bench, plain = Bench(), Bench()
    made = [bench.contribution(member) for member in range(3)]
    for one in made:
        bench.accumulate(one, 0, bench.reduction(made).scale_bits + finer, server_round)
    assert bench.reduce(made, 0) == plain.reduce([plain.contribution(member) for member in range(3)], 0)


def test_a_mean_is_the_weighted_mean_of_the_deltas() -> None:
    bench = Bench(settings=BY_EXAMPLES)
    made = [bench.contribution(0, num_examples=2), bench.contribution(1, num_examples=6)]
    decoded = codecs.get("int8").decode(bench.reduce(made, 0), 4096)
    parts = [delta(bench.one.federation.schema, member).vector[:4096].astype(np.float64) for member in range(2)]
    exact = (2 * parts[0] + 6 * parts[1]) / 8
    assert np.abs(decoded - exact).max() <= np.abs(exact).max() / 127


def test_a_mean_of_deltas_a_step_is_multiplied_by_the_mean_of_the_steps() -> None:
    bench = Bench()
    made = [bench.contribution(0, local_steps=1), bench.contribution(1, local_steps=9)]
    decoded = codecs.get("int8").decode(bench.reduce(made, 0), 4096)
    parts = [delta(bench.one.federation.schema, member).vector[:4096].astype(np.float64) for member in range(2)]
    exact = 5 * (parts[0] + parts[1]) / 2
    assert np.abs(decoded - exact).max() <= np.abs(exact).max() / 127


def test_a_preview_gives_what_folding_gives_and_changes_nothing() -> None:
    bench = Bench()
    for _ in range(3):
        decided = bench.decided()
        before = bench.replica.state.vector.tobytes(), bench.replica.head
        draft = msgspec.structs.replace(decided.body, model_hash=b"", state_hash=b"")
        found = bench.bench.preview(Preview(draft))
        assert found.draft is draft and not found.finding
        assert (bench.replica.state.vector.tobytes(), bench.replica.head) == before
        assert (found.model_hash, found.state_hash) == (decided.body.model_hash, decided.body.state_hash)
        bench.bench.fold(decided.commit, decided.body)
        assert bench.replica.state.vector.tobytes() != before[0]
        assert bench.replica.head.model_hash == found.model_hash
    assert bench.replica.head.server_round == 3


def test_a_preview_of_a_damaged_or_missing_update_is_a_finding() -> None:
    bench = Bench()
    decided = bench.decided()
    for update in (bench.store.put(decided.updates[0][:-1]), BlobRef(b"x" * 32, 9)):
        updates = (update, *decided.body.updates[1:])
        found = bench.bench.preview(Preview(msgspec.structs.replace(decided.body, updates=updates)))
        assert found.finding and not found.model_hash and not found.state_hash


def test_a_sound_body_passes_the_examination_with_and_without_votes() -> None:
    bench = Bench()
    decided = bench.decided()
    for commit in (None, decided.commit):
        found = bench.bench.examine(Examine(decided.raw, commit))
        assert found.raw == decided.raw and found.finding == ""


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"state_hash": b"x" * 32}, "another state"),
        ({"model_hash": b"x" * 32}, "another state"),
        ({"total_share": 1}, "total_share"),
        ({"metrics": {"accuracy": 1.0}}, "metrics"),
        ({"stop": "enough"}, "stop"),
        ({"next_clip_bound": 1.0}, "next_clip_bound"),
        ({"parent": b"x" * 32}, "follow the head"),
        ({"counted": ()}, "other contributions"),
    ],
)
def test_a_body_that_does_not_follow_from_its_evidence_is_found_out(changes: dict[str, Any], finding: str) -> None:
    bench = Bench()
    decided = bench.decided()
    raw = msgspec.msgpack.encode(msgspec.structs.replace(decided.body, **changes))
    assert finding in bench.bench.examine(Examine(raw, None)).finding


def test_bytes_that_are_no_body_or_have_too_few_votes_are_found_out() -> None:
    bench = Bench()
    decided = bench.decided()
    assert bench.bench.examine(Examine(b"\xc1", None)).finding
    assert (
        "majority" in bench.bench.examine(Examine(decided.raw, Commit(decided.raw, decided.commit.votes[:1]))).finding
    )


def test_folding_what_gives_another_state_is_an_error() -> None:
    bench = Bench()
    decided = bench.decided()
    body = msgspec.structs.replace(decided.body, state_hash=b"x" * 32)
    with pytest.raises(LedgerError, match="another state"):
        bench.bench.fold(decided.commit, body)


def test_the_row_of_a_round_says_who_took_part() -> None:
    bench = Bench()
    decided = bench.decided(2)
    row = bench.bench.row(decided.body, 4.0)
    assert (row.server_round, row.contributions, row.seconds, row.training_seconds) == (1, 2, 4.0, 0.25)
    assert row.clients == tuple(one.client for one in decided.body.counted)
    assert row.num_examples == (8, 8) and row.local_steps == (2, 2) and row.model_hash == decided.body.model_hash
