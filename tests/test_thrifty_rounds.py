"""Whole rounds in the codecs that lose much: warm-up, admission by the round's codec, and real clients that owe."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from brokers.admission import check_manifest
from brokers.planner import work_order
from clients.outbox import Outbox
from ravnest_fed.blobs import BlobStore, DiskBlobs
from ravnest_fed.decree import open_evidence
from ravnest_fed.errors import AdmissionRefused
from ravnest_fed.facts import Body, Manifest, decode
from ravnest_fed.federation import Federation
from ravnest_fed.ledger import Ledger
from ravnest_fed.messages import Reason
from tests.building import contribution, tiny
from tests.joined import Joined
from tests.test_processes import ended
from tests.tiny_federation import cluster_of, found_tiny, operator


@pytest.mark.parametrize("up", ["int4", "sign", "topk128", "topk64", "topk40"])
def test_rounds_commit_the_same_bits_everywhere_in_every_codec(up: str) -> None:
    seen = set()
    for brokers in (1, 3):
        joined = Joined.started(brokers, 3, codecs={"up": up, "down": "int4"})
        for server_round in range(1, 6):
            joined.contribute()
            assert joined.rounds() == {server_round}
        seen |= joined.model_hashes()
    assert len(seen) == 1


def codecs_counted(federation: Federation, body: Body, blobs: BlobStore) -> set[str]:
    """The codecs of the contributions that a round counted."""
    evidence = open_evidence(federation, blobs.read(body.evidence.hash))
    return {decode(Manifest, signed.payload).codec for signed in evidence.manifests}


def test_contributions_are_int4_until_warm_up_is_over() -> None:
    joined = Joined.started(3, 2, codecs={"up": "topk40", "warmup_rounds": 2})
    for _ in range(4):
        joined.contribute()
    disk = joined.brokers["b1"].disk
    bodies = [decode(Body, disk.commits[server_round].body) for server_round in range(1, 5)]
    found = [codecs_counted(joined.federation, body, disk.blobs) for body in bodies]
    assert found == [{"int4"}, {"int4"}, {"topk40"}, {"topk40"}]


@pytest.mark.parametrize(
    ("server_round", "right", "wrong"), [(0, "int4", "topk64"), (1, "int4", "topk64"), (2, "topk64", "int4")]
)
def test_a_contribution_is_admitted_in_its_rounds_codec_alone(server_round: int, right: str, wrong: str) -> None:
    one = tiny(settings={"up": "topk64", "warmup_rounds": "2"})
    head = msgspec.structs.replace(one.replica().head, server_round=server_round)
    assert work_order(one.federation, head, one.members[0].node_id).codec == right
    good = contribution(one, head, 0)
    assert check_manifest(one.federation, head, good.signed, good.shards, 0).codec == right
    bad = contribution(one, head, 0, codec=wrong)
    with pytest.raises(AdmissionRefused, match=f"the codec is '{wrong}', not {right}") as caught:
        check_manifest(one.federation, head, bad.signed, bad.shards, 0)
    assert caught.value.reason == Reason.WRONG_CODEC


@pytest.mark.processes
def test_real_clients_keep_what_they_owe_and_the_ledger_verifies(tmp_path: Path) -> None:
    founded = found_tiny(tmp_path, brokers=1, clients=2, min_contributions=2, rounds=4, up="sign", warmup_rounds=2)
    federation = founded.federation
    with cluster_of(founded) as cluster:
        cluster.start_broker("b1")
        clients = [cluster.start_client(name) for name in ("c1", "c2")]
        assert [ended(node) for node in clients] == [0, 0]
    ledger = Ledger(founded.broker_folders[0], federation.fingerprint, create=False)
    blobs = DiskBlobs(founded.broker_folders[0] / "blobs", tidy=False)
    found = [codecs_counted(federation, body, blobs) for _, body in ledger.commits()]
    ledger.close()
    assert found == [{"int4"}, {"int4"}, {"sign"}, {"sign"}]
    assert operator("verify", founded.folder).exit_code == 0
    for member in federation.members:
        outbox = Outbox(founded.folder / "state" / member.name, federation.fingerprint, member.node_id)
        assert outbox.standing.offer is None
        (residual,) = outbox.standing.residual
        owed = np.frombuffer(outbox.read(residual.hash), "<f4")
        assert owed.size == 4096 and owed[:39].all() and not owed[39:].any()
