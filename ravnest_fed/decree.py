"""What a decree may hold: derives a body's fields from signed facts, and checks a body or a commit against them.

The proposer of a round and everybody who votes, follows or verifies use the same pure functions, so that a body that
was derived in any other way is found out by all.
"""

import math
from collections.abc import Iterable, Sequence

from ravnest_fed.aggregation.fixed_point import choose_scale_bits
from ravnest_fed.aggregation.norms import clip_bound
from ravnest_fed.aggregation.weighting import weigh
from ravnest_fed.errors import AdmissionRefused, VerificationError
from ravnest_fed.facts import (
    MAX_FACT_BYTES,
    BlobRef,
    Body,
    Commit,
    Counted,
    Evaluation,
    Evidence,
    Manifest,
    Reduction,
    Vote,
    body_hash,
    decode,
    encode,
    open_signed,
    signed_hash,
    within_bounds,
)
from ravnest_fed.federation import Federation
from ravnest_fed.framing import pack, unpack
from ravnest_fed.head import Head
from ravnest_fed.identity import Signed
from ravnest_fed.manifests import has_base, order_of, require_countable
from ravnest_fed.roster import change_finding, roster_with

MAX_METRIC = 1e100
"""Greatest magnitude of a metric: sums over all clients, weighted by their examples, stay finite."""


MAX_RECORD_BYTES = 2**28
"""Most bytes of a commit: the body of a million contributions."""


def count(federation: Federation, head: Head, manifest: Manifest, manifest_hash: bytes) -> Counted:
    """How a contribution based on `head` counts: its integer weight and share."""
    strategy = federation.strategy
    weight = weigh(
        manifest.num_examples,
        federation.max_examples,
        federation.weighting,
        manifest.norm,
        head.clip_bound,
        strategy.max_weight,
        head.server_round - manifest.base_round,
    )
    return Counted(
        manifest.client,
        manifest.sequence,
        manifest_hash,
        weight.weight,
        weight.share,
        manifest.norm,
        manifest.max_abs,
        federation.steps_counted(manifest.local_steps),
        manifest.slice,
    )


def reduction_of(federation: Federation, head: Head, counted: Iterable[Counted]) -> Reduction:
    """The reduction over these contributions, ordered by client."""
    ordered = tuple(sorted(counted, key=lambda one: one.client))
    scale = head.scale_bits
    if scale is None:
        maxima = [one.max_abs for one in ordered]
        scale = choose_scale_bits(maxima, federation.limits.max_contributions)
    total = sum(one.share for one in ordered)
    steps = sum(one.share * one.steps for one in ordered)
    return Reduction(head.server_round + 1, head.commit_hash, ordered, total, scale, steps)


def weighted_means(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """Example-weighted mean of each metric over the clients that measured it; exactly rounded sums."""
    means = {}
    for name in sorted({name for evaluation in evaluations for name in evaluation.metrics}):
        having = [one for one in evaluations if name in one.metrics]
        total = math.fsum(one.num_examples for one in having)
        means[name] = math.fsum(one.num_examples * one.metrics[name] for one in having) / total
    return means


def evaluation_of(federation: Federation, head: Head, signed: Signed) -> Evaluation | None:
    """The evaluation of the head's model in `signed`, or None where it is not one or not sound."""
    evaluation = None
    if within_bounds(signed):
        evaluation = open_signed(Evaluation, signed, federation.public_key(signed.node_id))
    if (
        evaluation is None
        or evaluation.client != signed.node_id
        or evaluation.client not in federation.member_by_id
        or evaluation.federation != federation.fingerprint
        or evaluation.server_round != head.server_round
        or evaluation.model_hash != head.model_hash
        or not 0 < evaluation.num_examples <= 2**48
        or len(evaluation.metrics) > federation.limits.max_metrics
        or not all(abs(value) <= MAX_METRIC and len(name) <= 64 for name, value in evaluation.metrics.items())
    ):
        return None
    return evaluation


def evidence_for(manifests: Sequence[Signed], evaluations: Iterable[Signed]) -> bytes:
    """The evidence blob: manifests in the order counted, evaluations by client."""
    return pack(encode(Evidence(tuple(manifests), tuple(sorted(evaluations, key=lambda one: one.node_id)))))


def open_evidence(federation: Federation, evidence: bytes) -> Evidence:
    """The facts in an evidence blob. Raises PayloadError or RemoteProtocolError."""
    facts = federation.limits.max_contributions + len(federation.members)
    return decode(Evidence, unpack(evidence, MAX_FACT_BYTES * facts))


def draft(
    federation: Federation,
    head: Head,
    reduction: Reduction,
    evidence: bytes,
    updates: Sequence[BlobRef],
    owners: tuple[int, ...],
    date_reached: bool,
    change: Signed | None = None,
) -> Body:
    """The body for these results, with `model_hash` and `state_hash` still empty: folding gives them."""
    facts = open_evidence(federation, evidence)
    opened = [evaluation_of(federation, head, signed) for signed in facts.evaluations]
    metrics = weighted_means([one for one in opened if one is not None])
    history = federation.strategy.norm_history
    maxima = (*head.maxima, *(one.max_abs for one in reduction.counted))[-history:]
    norms = (*head.norms, *(one.norm for one in reduction.counted))[-history:]
    return Body(
        federation=federation.fingerprint,
        server_round=reduction.server_round,
        parent=head.commit_hash,
        counted=reduction.counted,
        total_share=reduction.total_share,
        scale_bits=reduction.scale_bits,
        evidence=BlobRef.of(evidence, inline=False),
        metrics=metrics,
        updates=tuple(update.bare() for update in updates),
        owners=owners,
        next_scale_bits=choose_scale_bits(maxima, federation.limits.max_contributions),
        next_clip_bound=clip_bound(norms, federation.strategy.clip_factor),
        model_hash=b"",
        state_hash=b"",
        stop=stop_reason(federation, reduction.server_round, metrics, date_reached),
        change=change,
        total_steps=reduction.total_steps,
    )


def stop_reason(federation: Federation, server_round: int, metrics: dict[str, float], date_reached: bool) -> str:
    """Why training ends with `server_round`; empty while it goes on."""
    stop = federation.stop
    if stop.rounds and server_round >= stop.rounds:
        return f"the last of {stop.rounds} rounds is committed"
    if stop.metric and stop.metric in metrics:
        value = metrics[stop.metric]
        if stop.at_least is not None and value >= stop.at_least:
            return f"{stop.metric} reached {stop.at_least}"
        if stop.at_most is not None and value <= stop.at_most:
            return f"{stop.metric} fell to {stop.at_most}"
    return f"the date {stop.date} is reached" if date_reached else ""


def check_body(federation: Federation, head: Head, body: Body, evidence: bytes) -> None:
    """Raise VerificationError, naming the finding, unless `body` follows from `head` and the signed `evidence`.

    The update's shards and the state hash are checked by folding, not here.
    """
    where = f"round {body.server_round}"
    if body.federation != federation.fingerprint:
        raise VerificationError(f"{where}: the body belongs to another federation")
    if body.server_round != head.server_round + 1 or body.parent != head.commit_hash:
        raise VerificationError(f"{where}: the body does not follow the head, round {head.server_round}")
    if BlobRef.of(evidence, inline=False) != body.evidence:
        raise VerificationError(f"{where}: the evidence has another hash than the body names")
    facts = open_evidence(federation, evidence)
    if len(body.counted) != len(facts.manifests) or not body.counted:
        raise VerificationError(f"{where}: the body counts other contributions than its evidence holds")
    if len(body.counted) > federation.limits.max_contributions:
        raise VerificationError(f"{where}: the body counts more contributions than the limit allows")
    for counted, signed in zip(body.counted, facts.manifests, strict=True):
        finding = contribution_finding(federation, head, counted, signed)
        if finding:
            raise VerificationError(f"{where}: the contribution of {federation.name_of(counted.client)} {finding}")
    if not one_a_client([counted.client for counted in body.counted]):
        raise VerificationError(f"{where}: contributions are out of order, or two are of one client")
    for signed in facts.evaluations:
        if evaluation_of(federation, head, signed) is None:
            raise VerificationError(f"{where}: the evaluation of {federation.name_of(signed.node_id)} is not sound")
    if len({signed.node_id for signed in facts.evaluations}) != len(facts.evaluations):
        raise VerificationError(f"{where}: two evaluations are of one client")
    if body.change is not None and (wrong := change_finding(federation, head, body.change)):
        raise VerificationError(f"{where}: the change of the roster does not hold: {wrong}")
    shards, roster = federation.schema.shards, roster_with(head, body.change)
    if len(body.updates) != len(shards):
        raise VerificationError(f"{where}: the update has {len(body.updates)} shards, the schema {len(shards)}")
    if len(body.owners) != len(shards) or not all(0 <= owner < len(roster) for owner in body.owners):
        raise VerificationError(f"{where}: the next round's owners do not fit the schema and the roster")
    reduction = reduction_of(federation, head, body.counted)
    date_reached = bool(federation.stop.date) and body.stop.startswith("the date ")
    expected = draft(federation, head, reduction, evidence, body.updates, body.owners, date_reached, body.change)
    for name in Body.__struct_fields__:
        if name not in ("model_hash", "state_hash", "evidence") and getattr(body, name) != getattr(expected, name):
            raise VerificationError(f"{where}: {name} is not what the contributions give")


def one_a_client(clients: Sequence[str]) -> bool:
    """Whether the clients counted are in order, and each stands there once."""
    return list(clients) == sorted(set(clients))


def contribution_finding(federation: Federation, head: Head, counted: Counted, signed: Signed) -> str:
    """What is wrong with counting `signed` as `counted` on top of `head`; empty if nothing is."""
    if counted.client not in federation.member_by_id:
        return "is by a stranger"
    manifest = open_signed(Manifest, signed, federation.public_key(signed.node_id))
    if manifest is None or manifest.client != signed.node_id:
        return "has a wrong signature"
    if manifest.federation != federation.fingerprint:
        return "belongs to another federation"
    if not has_base(head, manifest):
        return "has a base that this round does not count"
    if manifest.last_round < head.server_round + 1:
        return "is past its last round"
    if head.was_counted(manifest.client, manifest.sequence):
        return "was counted before"
    if order_of(federation, manifest) is None:
        return "carries no valid work order"
    try:
        require_countable(federation, head, manifest)
    except AdmissionRefused as error:
        return f"cannot count: {error.what}"
    if counted != count(federation, head, manifest, signed_hash(signed)):
        return "is weighed wrongly"
    return ""


def open_commit(record: bytes) -> Commit:
    """The commit in a framed record, as it travels. Raises PayloadError or RemoteProtocolError."""
    return decode(Commit, unpack(record, MAX_RECORD_BYTES))


def check_votes(federation: Federation, commit: Commit) -> int:
    """The view in which a majority voted for the commit's body. Raises VerificationError, naming the finding."""
    voters: set[str] = set()
    views: set[int] = set()
    wanted = body_hash(commit.body)
    server_round = decode(Body, commit.body).server_round
    where = f"round {server_round}"
    for signed in commit.votes:
        vote = None
        if signed.node_id in federation.broker_by_id:
            vote = open_signed(Vote, signed, federation.public_key(signed.node_id))
        if vote is None or vote.federation != federation.fingerprint:
            raise VerificationError(f"{where}: the vote of {federation.name_of(signed.node_id)} has a wrong signature")
        if vote.body_hash != wanted or vote.server_round != server_round:
            raise VerificationError(f"{where}: the vote of {federation.name_of(signed.node_id)} is for another body")
        voters.add(signed.node_id)
        views.add(vote.view)
    if len(views) > 1:
        raise VerificationError(f"{where}: the votes are of different views")
    if len(voters) < federation.majority:
        raise VerificationError(
            f"{where}: {len(voters)} of {len(federation.brokers)} brokers voted, a majority is {federation.majority}"
        )
    return views.pop()
