"""A recipe of a few parameters that trains in milliseconds, and how tests found, call and watch federations of it."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner, Result

from ravnest_fed.cluster import Cluster, Node, free_addresses
from ravnest_fed.commands.main import cli
from ravnest_fed.facts import Evaluation, decode
from ravnest_fed.federation import FILE_NAME, Federation
from ravnest_fed.founding import Founded, found
from ravnest_fed.ledger import Ledger
from ravnest_fed.recipe import load_recipe

# The environment turns it bad: a recipe's hash is over its text, so each of these is the same recipe to a broker.
RECIPE = """
import os
import time
import torch
import ravnest_fed as rf

class Tiny(rf.Recipe):
    micro_batch = 8
    local_steps = 2
    def model(self):
        return torch.nn.Linear(int(os.environ.get("TINY_WIDTH", "12")), 3)
    def train_data(self, part):
        if "TINY_EMPTY" in os.environ:
            return []
        inputs = torch.randn(64, 12, generator=torch.Generator().manual_seed(part.index))
        return inputs, inputs[:, :3] * 2 + part.index
    def loss(self, model, batch):
        time.sleep(float(os.environ.get("TINY_PAUSE", "0")))
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        return loss * float("nan") if "TINY_NAN" in os.environ else loss
    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05)
    def evaluate(self, model):
        return {"size": float(sum(one.square().sum() for one in model.parameters()))}
"""


def write_recipe(folder: Path, text: str = RECIPE) -> Path:
    """The tiny recipe, or another one's text, as a file in `folder`."""
    path = folder / "tiny.py"
    path.write_text(text)
    return path


def found_tiny(folder: Path, brokers: int, clients: int, recipe: str = RECIPE, **settings: object) -> Founded:
    """A federation in `folder`/federation; settings by their short names, such as `grace_seconds`."""
    texts = {name: str(value) for name, value in settings.items()}
    loaded = load_recipe(write_recipe(folder, recipe))
    return found(loaded, free_addresses(brokers), clients, texts, None, folder / "federation")


def cluster_of(founded: Founded) -> Cluster:
    """The processes of a federation that `found_tiny` made."""
    return Cluster(founded, founded.folder.parent / "tiny.py")


def operator(*arguments: object) -> Result:
    """Run a `ravnest-fed` command within this process."""
    return CliRunner().invoke(cli, [str(one) for one in arguments])


@dataclass
class Ended:
    """How a process ended: exit status, what it printed on both streams, and how long it ran, in seconds."""

    status: int
    output: str
    errors: str
    seconds: float


def call(module: str, *arguments: object, limit: float = 90.0) -> Ended:
    """Run a command as a process to its end, which must come within `limit` seconds."""
    began = time.monotonic()
    words = [sys.executable, "-m", module, *(str(one) for one in arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=limit, check=False)
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


def until(condition: Callable[[], bool], what: str, limit: float = 60.0) -> None:
    """Return once `condition` holds; fail with `what` if it does not within `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit:.0f} s: {what}"
        time.sleep(0.05)


def said(node: Node, text: str) -> bool:
    """Whether a process of a cluster has printed `text`."""
    return node.log.exists() and text in node.log.read_text(errors="replace")


def one_line_error(text: str, *parts: str) -> None:
    """Assert that `text` is a single line of the form `error: what; what to do` that holds all `parts`."""
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("error: "), text
    assert "Traceback" not in text
    for part in parts:
        assert part in lines[0], f"{part!r} is not in {lines[0]!r}"


def federation_in(folder: Path) -> Federation:
    """The federation file of `folder`."""
    return Federation.load(folder / FILE_NAME)


def hashes_measured(cluster: Cluster) -> dict[int, dict[str, bytes]]:
    """By round and client, the hash of the model that the client measured and signed for."""
    found: dict[int, dict[str, bytes]] = {}
    for folder in cluster.founded.broker_folders:
        ledger = Ledger(folder, cluster.founded.federation.fingerprint, create=False)
        for server_round in range(1, ledger.last_round() + 1):
            for signed in ledger.evaluations(server_round):
                evaluation = decode(Evaluation, signed.payload)
                found.setdefault(server_round, {})[signed.node_id] = evaluation.model_hash
        ledger.close()
    return found
