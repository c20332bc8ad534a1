"""A tiny federation for tests: identities, a schema of a few blocks, signed facts and offers with real payloads.

Everything follows from names and numbers: the same call gives the same bytes. Nodes are named by index; `head` is the
head that a fact rests on, `tiny(...).replica().head` at the start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ravnest_fed import codecs
from ravnest_fed.aggregation.norms import combine, square_sum
from ravnest_fed.aggregation.reduce import BUFFER_CODEC, reduce_shard
from ravnest_fed.aggregation.weighting import Weight
from ravnest_fed.codecs.counters import encode_counters
from ravnest_fed.decree import count, draft, evidence_for, reduction_of
from ravnest_fed.facts import (
    BlobRef,
    Body,
    Commit,
    Evaluation,
    Manifest,
    Vote,
    WorkOrder,
    body_hash,
    encode,
    sign,
    signed_hash,
)
from ravnest_fed.federation import Federation, from_tables, with_settings
from ravnest_fed.federation_checks import FORMAT
from ravnest_fed.hashing import digest, merkle_root
from ravnest_fed.head import Head, balanced_owners
from ravnest_fed.identity import Identity, Signed
from ravnest_fed.messages import Offer, RoundRow
from ravnest_fed.parameters import BLOCK, ModelState, Schema, TensorSpec
from ravnest_fed.replica import Replica, model_hash
from ravnest_fed.slices import first

SETTINGS = {"local_steps": "2", "micro_batch": "4", "min_contributions": "1", "grace_seconds": "1.0"}


def identity(name: str) -> Identity:
    """The node of this name, always with the same keys."""
    return Identity(digest("test identity", name.encode()))


def tiny_schema(blocks: int = 3, buffers: int = 5, counters: int = 2) -> Schema:
    """`blocks` shards of parameters (the last one padded), one of buffers and one of counters; 0: none of a kind."""
    return Schema(
        parameters=(TensorSpec("weight", (blocks * BLOCK - 100,), "float32"), TensorSpec("bias", (90,), "float32")),
        buffers=(TensorSpec("norm.running_var", (buffers,), "float32", 0.0),) if buffers else (),
        counters=(TensorSpec("norm.num_batches_tracked", (counters,), "int64"),) if counters else (),
        frozen_hash="00" * 32,
        shard_size=BLOCK,
    )


def initial_state(schema: Schema) -> ModelState:
    """Small values at the tensors' places, zeros in the padding."""
    state = ModelState.zeros(schema)
    for spec in schema.parameters:
        state.view(schema, spec.name)[...] = np.linspace(-1, 1, spec.count, dtype=np.float32).reshape(spec.shape)
    for spec in schema.buffers:
        state.view(schema, spec.name)[...] = 1.0
    return state


def tables(brokers: int = 3, members: int = 4, schema: Schema | None = None) -> dict[str, Any]:
    """The TOML tables of the federation, to be tampered with before `from_tables` checks them."""
    schema = schema or tiny_schema()
    operator = identity("operator")

    def entry(name: str) -> dict[str, str]:
        one = identity(name)
        return {"name": name, "public_key": one.public_key.hex(), "curve_key": one.curve_public.hex()}

    found: dict[str, Any] = {
        "federation": {
            "format": FORMAT,
            "name": "tiny",
            "created": "2025-01-01T00:00:00+00:00",
            "seed": 7,
            "topology": "parameter-server" if brokers == 1 else "butterfly",
            "recipe": "tiny",
            "recipe_hash": "11" * 32,
            "model_hash": model_hash(schema, initial_state(schema)).hex(),
        },
        "operator": {"public_key": operator.public_key.hex(), "curve_key": operator.curve_public.hex()},
        "brokers": [
            {
                **entry(f"b{number}"),
                "client_address": f"tcp://127.0.0.1:{7000 + 2 * number}",
                "peer_address": f"tcp://127.0.0.1:{7001 + 2 * number}",
            }
            for number in range(1, brokers + 1)
        ],
        "members": [entry(f"c{number}") for number in range(1, members + 1)],
        "schema": msgspec.to_builtins(schema),
    }
    with_settings(found, SETTINGS)
    return found


@dataclass(frozen=True)
class Tiny:
    """A federation with the secret keys of all its nodes, in the file's order."""

    federation: Federation
    operator: Identity
    brokers: tuple[Identity, ...]
    members: tuple[Identity, ...]

    def replica(self) -> Replica:
        """A new replica at round 0."""
        return Replica(self.federation, initial_state(self.federation.schema))


def tiny(
    brokers: int = 3,
    members: int = 4,
    settings: Mapping[str, str] | None = None,
    schema: Schema | None = None,
    samples: int = 0,
) -> Tiny:
    """A federation of brokers b1, b2, ... and members c1, c2, ...; `settings` as `ravnest-fed init --set` takes them.

    With `samples` the clients share a data set of so many.
    """
    found = tables(brokers, members, schema)
    if samples:
        found["data"] = {"samples": samples}
    with_settings(found, settings or {})
    return Tiny(
        from_tables(found, "the tables"),
        identity("operator"),
        tuple(identity(f"b{number}") for number in range(1, brokers + 1)),
        tuple(identity(f"c{number}") for number in range(1, members + 1)),
    )


def delta(schema: Schema, seed: int, size: float = 0.01) -> ModelState:
    """A delta as training might give it: normal values of about `size`, counters that grew by 2."""
    generator = np.random.RandomState(seed)
    found = ModelState.zeros(schema)
    for spec in (*schema.parameters, *schema.buffers):
        found.view(schema, spec.name)[...] = (size * generator.standard_normal(spec.shape)).astype(np.float32)
    found.counters[...] = 2
    return found


@dataclass(frozen=True)
class Payload:
    """An encoded delta: one payload a shard, and what every decoder measures on it."""

    shards: tuple[bytes, ...]
    norm: float
    max_abs: float


def payload(federation: Federation, values: ModelState, server_round: int = 1) -> Payload:
    """Encode a delta for a round shard by shard, as a client does."""
    codec = codecs.get(federation.codec_up(server_round))
    shards, squares = [], []
    for shard in federation.schema.shards:
        part: Any = values.shard(shard)
        if shard.kind == "counters":
            shards.append(encode_counters(part))
        elif shard.kind == "buffers":
            shards.append(BUFFER_CODEC.encode(part))
        else:
            shards.append(codec.encode(part))
            squares.append(square_sum(codec.decode(shards[-1], shard.count)))
    return Payload(tuple(shards), combine(squares), max(part.max_abs for part in squares))


def work_order(one: Tiny, head: Head, member: int, broker: int = 0, **changes: Any) -> Signed:
    """What broker `broker` asks of `member` on top of `head`; `changes` replace fields before signing."""
    rounds = one.federation.rounds
    order = WorkOrder(
        federation=one.federation.fingerprint,
        client=one.members[member].node_id,
        base_round=head.server_round,
        base_hash=head.commit_hash,
        micro_batch=rounds.micro_batch,
        accumulation=rounds.accumulation,
        local_steps=rounds.local_steps,
        partition_index=member,
        partition_count=len(one.members),
        codec=one.federation.codec_up(head.server_round + 1),
        deadline_seconds=rounds.deadline_seconds,
        committed_steps=head.server_round * rounds.local_steps,
    )
    return sign(one.brokers[broker], msgspec.structs.replace(order, **changes))


@dataclass(frozen=True)
class Contribution:
    """A signed contribution with its payloads; `offer` is the message that brings it to a broker."""

    signed: Signed
    manifest: Manifest
    shards: tuple[BlobRef, ...]
    payload: Payload

    @property
    def manifest_hash(self) -> bytes:
        """What the contribution is known by."""
        return signed_hash(self.signed)

    @property
    def offer(self) -> Offer:
        """The offer of this contribution."""
        return Offer(self.signed, self.shards)


def contribution(
    one: Tiny,
    head: Head,
    member: int,
    sequence: int | None = None,
    values: ModelState | None = None,
    order: Signed | None = None,
    signer: Identity | None = None,
    **changes: Any,
) -> Contribution:
    """What `member` contributes on top of `head`; `changes` replace fields of the manifest before signing.

    The sequence is one more than the head's round, and the delta depends on the member and the round, unless given. Of
    shared data it covers the first samples of the member's region.
    """
    federation = one.federation
    values = values or delta(federation.schema, 1000 * head.server_round + member)
    encoded = payload(federation, values, head.server_round + 1)
    shards = tuple(BlobRef.of(part) for part in encoded.shards)
    order = order or work_order(one, head, member)
    manifest = Manifest(
        federation=federation.fingerprint,
        client=one.members[member].node_id,
        sequence=head.server_round + 1 if sequence is None else sequence,
        base_round=head.server_round,
        base_hash=head.commit_hash,
        last_round=head.server_round + 1 + federation.rounds.max_staleness,
        codec=federation.codec_up(head.server_round + 1),
        payload_root=merkle_root("payload", [ref.hash for ref in shards]),
        shard_count=len(shards),
        num_examples=federation.max_examples,
        local_steps=federation.rounds.local_steps,
        norm=encoded.norm,
        max_abs=encoded.max_abs,
        metrics={"loss": 1.5 + member},
        training_seconds=0.25,
        order=order,
    )
    manifest = msgspec.structs.replace(manifest, **changes)
    if head.deal is not None and "slice" not in changes:
        usable = head.deal.usable(manifest.client, head.server_round, federation.rounds.max_staleness)
        manifest = msgspec.structs.replace(manifest, slice=first(usable, manifest.num_examples))
    return Contribution(sign(signer or one.members[member], manifest), manifest, shards, encoded)


def evaluation(one: Tiny, head: Head, member: int, metrics: Mapping[str, float], **changes: Any) -> Signed:
    """What `member` measured on the model of `head`, over 10 examples unless `changes` say otherwise."""
    found = Evaluation(
        federation=one.federation.fingerprint,
        client=one.members[member].node_id,
        server_round=head.server_round,
        model_hash=head.model_hash,
        num_examples=10,
        metrics=dict(metrics),
    )
    return sign(one.members[member], msgspec.structs.replace(found, **changes))


def vote(one: Tiny, broker: int, raw: bytes, server_round: int, view: int = 0, **changes: Any) -> Signed:
    """The vote of broker `broker` for the body whose bytes are `raw`."""
    found = Vote(one.federation.fingerprint, server_round, view, body_hash(raw))
    return sign(one.brokers[broker], msgspec.structs.replace(found, **changes))


@dataclass(frozen=True)
class Decided:
    """A round that a majority committed, with every blob that its body names."""

    body: Body
    raw: bytes
    commit: Commit
    evidence: bytes
    updates: tuple[bytes, ...]

    def read_update(self, shard: int) -> bytes:
        """The encoded update of a shard."""
        return self.updates[shard]


def decide(
    one: Tiny,
    replica: Replica,
    contributions: Sequence[Contribution],
    evaluations: Sequence[Signed] = (),
    date_reached: bool = False,
    view: int = 0,
) -> Decided:
    """The round that follows `replica` over these contributions; the first brokers of the roster vote for it.

    The replica is left as it is: fold the result to go on.
    """
    federation, head = one.federation, replica.head
    ordered = sorted(contributions, key=lambda each: each.manifest.client)
    counted = [count(federation, head, each.manifest, each.manifest_hash) for each in ordered]
    reduction = reduction_of(federation, head, counted)
    chosen = {each.manifest_hash: Weight(each.weight, each.share) for each in counted}
    held = {each.manifest_hash: each.payload.shards for each in ordered}
    updates = tuple(
        reduce_shard(
            shard.kind,
            shard.count,
            chosen,
            reduction.total_share,
            lambda key, index=shard.index: held[key][index],  # type: ignore[misc]
            reduction.scale_bits,
            federation.limits.max_contributions,
            codecs.get(federation.codec_up(reduction.server_round)),
            codecs.get(federation.codecs.down),
            reduction.effective_steps,
        )
        for shard in federation.schema.shards
    )
    evidence = evidence_for([each.signed for each in ordered], evaluations)
    refs = [BlobRef.of(update) for update in updates]
    owners = balanced_owners(federation.schema, federation.roster, federation.roster, reduction.server_round + 1)
    body = draft(federation, head, reduction, evidence, refs, owners, date_reached)
    hashes = replica.preview(body, b"", lambda shard: updates[shard])
    body = msgspec.structs.replace(body, model_hash=hashes.model_hash, state_hash=hashes.state_hash)
    raw = encode(body)
    votes = tuple(vote(one, broker, raw, body.server_round, view) for broker in range(federation.majority))
    return Decided(body, raw, Commit(raw, votes), evidence, updates)


def row_of(decided: Decided, contributions: Sequence[Contribution]) -> RoundRow:
    """What a ledger keeps of a round for people to see."""
    return RoundRow(
        server_round=decided.body.server_round,
        contributions=len(contributions),
        model_hash=decided.body.model_hash,
        seconds=2.0,
        training_seconds=0.25,
        bytes_up=0,
        bytes_down=0,
        clients=tuple(each.manifest.client for each in contributions),
        num_examples=tuple(each.manifest.num_examples for each in contributions),
        local_steps=tuple(each.manifest.local_steps for each in contributions),
    )
