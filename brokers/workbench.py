"""The broker's heavy work: decoding, measuring, summing, encoding and folding. Runs off the event loop, one task a time.

Holds the replica and the running sums of the shards that this broker owns. Every method takes and gives plain values, so
that the simulator can call it as it is.
"""

import contextlib

from brokers.effects import Accumulate, Adopt, Examine, Inspect, Preview, Reduce, TakeUp, WriteCheckpoint
from brokers.events import Adopted, CheckpointWritten, Examined, Inspected, Previewed, Reduced
from ravnest_fed import codecs
from ravnest_fed.aggregation.fixed_point import OutOfRange
from ravnest_fed.aggregation.norms import SquareSum, combine, square_sum
from ravnest_fed.aggregation.reduce import ShardAccumulator, check_shard
from ravnest_fed.aggregation.weighting import Weight
from ravnest_fed.blobs import BlobMissing, BlobStore
from ravnest_fed.checkpoints import checkpoint_pieces, read_checkpoint
from ravnest_fed.codecs.counters import decode_counters
from ravnest_fed.decree import check_body, check_votes, open_evidence
from ravnest_fed.errors import LedgerError, PayloadError, RavnestError
from ravnest_fed.facts import Body, Commit, Manifest, decode
from ravnest_fed.federation import Federation
from ravnest_fed.manifests import order_of
from ravnest_fed.messages import Reason, RoundRow
from ravnest_fed.replica import Replica, updates_of


class Workbench:
    """One broker's calculations: contributions are read from `spool`, updates and evidence are in `store`."""

    def __init__(self, replica: Replica, store: BlobStore, spool: BlobStore) -> None:
        self.replica = replica
        self._store = store
        self._spool = spool
        self._sums: dict[int, ShardAccumulator] = {}
        self._payloads: dict[tuple[int, bytes], bytes] = {}
        self._sums_round = 0
        self._candidate: Replica | None = None

    @property
    def federation(self) -> Federation:
        """The federation, with the roster in force for the open round."""
        return self.replica.federation

    def inspect(self, task: Inspect) -> Inspected:
        """Decode every shard of an upload, and measure the norm and the range that its manifest declares."""
        manifest = task.manifest
        squares: list[SquareSum] = []
        order = order_of(self.federation, manifest)
        accumulation = order.accumulation if order else 1
        up = codecs.get(manifest.codec)
        try:
            for shard, ref in zip(self.federation.schema.shards, task.shards, strict=True):
                payload = self._spool.read(ref.hash)
                if shard.kind == "parameters":
                    squares.append(square_sum(up.entries(payload, shard.count, 0, shard.count).values))
                elif shard.kind == "counters":
                    decode_counters(payload, shard.count, manifest.local_steps * accumulation)
                else:
                    check_shard(shard.kind, payload, shard.count, up, self.federation.limits.max_contributions)
        except OutOfRange as error:
            return Inspected(task.manifest_hash, Reason.OUT_OF_RANGE, str(error))
        except BlobMissing:
            text = "the round was closed while the contribution was on its way"
            return Inspected(task.manifest_hash, Reason.OUT_OF_DATE, text)
        except LedgerError as error:
            return Inspected(
                task.manifest_hash, Reason.DAMAGED_PAYLOAD, f"the upload was damaged on this disk: {error}"
            )
        except PayloadError as error:
            reason = Reason.NOT_FINITE if "finite" in str(error) else Reason.DAMAGED_PAYLOAD
            return Inspected(task.manifest_hash, reason, str(error))
        norm = combine(squares)
        greatest = max(part.max_abs for part in squares)
        if norm != manifest.norm or greatest != manifest.max_abs:
            text = f"the delta's norm is {norm:.6g} and its range {greatest:.6g}, the manifest declares otherwise"
            return Inspected(task.manifest_hash, Reason.WRONG_NORM, text)
        return Inspected(task.manifest_hash, "", "")

    def accumulate(self, task: Accumulate) -> None:
        """Add a contribution to the running sum of a shard, ahead of the plan."""
        sums = self._sum(task.server_round, task.shard, task.scale_bits)
        self._payloads[(task.shard, task.manifest_hash)] = task.ref.hash
        # What the spool does not hold any more belongs to a round that was closed meanwhile.
        with contextlib.suppress(BlobMissing):
            sums.add(task.manifest_hash, self._spool.read(task.ref.hash), task.weight)

    def reduce(self, task: Reduce) -> Reduced | None:
        """Encode the mean of a shard over exactly the contributions of the reduction; None where they are gone."""
        reduction = task.reduction
        sums = self._sum(reduction.server_round, task.shard, reduction.scale_bits)
        for ref, one in zip(task.refs, reduction.counted, strict=True):
            self._payloads[(task.shard, one.manifest_hash)] = ref.hash
        chosen = {one.manifest_hash: Weight(one.weight, one.share) for one in reduction.counted}
        try:
            encoded = sums.finish(
                chosen,
                reduction.total_share,
                lambda key: self._spool.read(self._payloads[(task.shard, key)]),
                reduction.effective_steps,
            )
        except BlobMissing:
            return None
        return Reduced(task.reduction_hash, task.shard, self._store.put(encoded))

    def preview(self, task: Preview) -> Previewed:
        """The hashes that folding a draft would give."""
        try:
            # What a proposer could not vote for must not be proposed: it would bind every later view.
            check_body(self.federation, self.replica.head, task.draft, self._store.read(task.draft.evidence.hash))
            hashes = self.replica.preview(task.draft, b"", updates_of(task.draft, self._store))
        except RavnestError as error:
            return Previewed(task.draft, b"", b"", str(error))
        return Previewed(task.draft, hashes.model_hash, hashes.state_hash, "")

    def examine(self, task: Examine) -> Examined:
        """Check a body against its evidence and the head, and fold it on trial."""
        try:
            body = decode(Body, task.raw)
            if task.commit is not None:
                check_votes(self.federation, task.commit)
            check_body(self.federation, self.replica.head, body, self._store.read(body.evidence.hash))
            hashes = self.replica.preview(body, task.raw, updates_of(body, self._store))
        except RavnestError as error:
            return Examined(task.raw, str(error))
        if hashes.model_hash != body.model_hash or hashes.state_hash != body.state_hash:
            return Examined(task.raw, "folding the update gives another state than the body names")
        return Examined(task.raw, "")

    def fold(self, commit: Commit, body: Body) -> None:
        """Fold a commit for good. Raises LedgerError if it does not give the committed state."""
        self.replica.fold(body, commit.body, updates_of(body, self._store))

    def write_checkpoint(self, task: WriteCheckpoint) -> CheckpointWritten:
        """Write the replica as it stands as a checkpoint. A full disk costs the checkpoint, not the broker."""
        assert self.replica.head.server_round == task.server_round
        try:
            ref = self._store.put_pieces(checkpoint_pieces(self.replica))
        except OSError as error:
            return CheckpointWritten(task.server_round, None, str(error))
        return CheckpointWritten(task.server_round, ref, "")

    def adopt(self, task: Adopt) -> Adopted:
        """Read a checkpoint and check that its state is the committed one; `take_up` then goes on from it."""
        try:
            self._candidate = read_checkpoint(self._store.view(task.checkpoint.hash), self.federation, task.commit.body)
        except RavnestError as error:
            return Adopted(task.commit, task.server_round, task.checkpoint, None, str(error))
        return Adopted(task.commit, task.server_round, task.checkpoint, self._candidate.head, "")

    def take_up(self, task: TakeUp) -> None:
        """Go on from the checkpoint that was read last."""
        assert self._candidate is not None and self._candidate.head.server_round == task.server_round
        self.replica.take(self._candidate)
        self._candidate = None

    def row(self, body: Body, seconds: float) -> RoundRow:
        """What the ledger keeps of a round for people to see; bytes are filled in by whoever counts them."""
        evidence = open_evidence(self.federation, self._store.read(body.evidence.hash))
        manifests = [decode(Manifest, signed.payload) for signed in evidence.manifests]
        return RoundRow(
            server_round=body.server_round,
            contributions=len(body.counted),
            model_hash=body.model_hash,
            seconds=seconds,
            training_seconds=max((one.training_seconds for one in manifests), default=0.0),
            bytes_up=0,
            bytes_down=0,
            clients=tuple(one.client for one in manifests),
            num_examples=tuple(one.num_examples for one in manifests),
            local_steps=tuple(one.local_steps for one in manifests),
        )

    def _sum(self, server_round: int, shard: int, scale_bits: int) -> ShardAccumulator:
        if server_round != self._sums_round:
            self._sums, self._payloads = {}, {}
            self._sums_round = server_round
        known = self._sums.get(shard)
        if known is None or known.scale_bits != scale_bits:
            kind, count = self.federation.schema.shards[shard].kind, self.federation.schema.shards[shard].count
            known = self._sums[shard] = ShardAccumulator(
                kind,
                count,
                scale_bits,
                self.federation.limits.max_contributions,
                codecs.get(self.federation.codec_up(server_round)),
                codecs.get(self.federation.codecs.down),
            )
        return known
