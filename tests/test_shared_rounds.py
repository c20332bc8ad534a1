"""Real brokers and clients on one shared data set: each sample is trained on once an epoch, whoever is killed."""

from collections import Counter
from pathlib import Path

import pytest

from ravnest_fed.cluster import Cluster
from ravnest_fed.ledger import Ledger
from ravnest_fed.slices import Interval, SampleOrder, joined, size, without
from tests.tiny_federation import RECIPE, cluster_of, found_tiny, operator, said, until

pytestmark = pytest.mark.processes

SAMPLES = 96
SHARED = """
    def shared_data(self):
        rows = int(os.environ.get("ROWS", "96"))
        inputs = torch.randn(rows, 12, generator=torch.Generator().manual_seed(1))
        return torch.arange(rows), inputs, inputs[:, :3] * 2
    def loss(self, model, batch):
        numbers, inputs, goals = batch
        with open(os.path.join(os.environ["SEEN"], str(os.getpid())), "a") as file:
            print(*numbers.tolist(), file=file)
        time.sleep(0.05)
        return torch.nn.functional.mse_loss(model(inputs), goals)
"""


def shared(text: str) -> str:
    """The tiny recipe with data that all clients share; each notes the numbers of the samples it trains on."""
    start, stop = text.index("    def train_data"), text.index("    def optimizer")
    return text[:start] + SHARED.lstrip("\n") + text[stop:]


RECIPE_TEXT = shared(RECIPE)


def covered(cluster: Cluster) -> list[Interval]:
    """What the commits of a federation cover, piece by piece."""
    founded = cluster.founded
    ledger = Ledger(founded.broker_folders[0], founded.federation.fingerprint, create=False)
    try:
        return [piece for _, body in ledger.commits() for counted in body.counted for piece in counted.covered]
    finally:
        ledger.close()


def test_an_epoch_covers_every_sample_once_though_a_client_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    monkeypatch.setenv("SEEN", str(seen))
    settings = {"stop.rounds": 8, "grace_seconds": 1.0, "min_contributions": 1, "checkpoint_every": 0}
    founded = found_tiny(tmp_path, 2, 3, RECIPE_TEXT, **settings)
    assert founded.federation.data.samples == SAMPLES
    with cluster_of(founded) as cluster:
        cluster.start()
        until(lambda: any(said(node, "trained") for node in cluster.clients.values()), "a client trains")
        cluster.kill("c1")
        left = [cluster.clients[name] for name in ("c2", "c3")]
        until(lambda: not any(node.alive for node in left), "the others end", 120.0)
        assert [node.process.returncode for node in left] == [0, 0]
        status = " ".join(operator("status", founded.folder).output.split())
        pieces = covered(cluster)
    whole = joined(pieces)
    assert size(whole) == size(pieces), "a sample was covered twice"
    assert f"{size(whole) / SAMPLES:.2f} epochs of {SAMPLES} shared samples" in status
    # Two clients make 32 samples a round, in eight rounds; what was dealt to the third went to them.
    assert not without(((0, SAMPLES),), whole), "a sample of the first epoch was left out"
    order = SampleOrder(SAMPLES, founded.federation.federation.seed)
    trained = Counter(int(word) for file in seen.iterdir() for word in file.read_text().split())
    assert Counter(order.rows(tuple(whole)).tolist()) <= trained


def test_a_client_with_other_data_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    founded = found_tiny(tmp_path, 1, 1, RECIPE_TEXT)
    monkeypatch.setenv("ROWS", "95")
    with cluster_of(founded) as cluster:
        cluster.start_broker("b1")
        client = cluster.start_client("c1")
        until(lambda: not client.alive, "the client ends")
        assert client.process.returncode == 4
        assert "95 samples on this machine" in client.last_words()
