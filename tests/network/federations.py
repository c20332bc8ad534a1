"""Federations of one wide layer, whose delta is as large as a test wants it, and clients that dial through proxies."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ravnest_fed.cluster import Cluster, Node, free_addresses
from ravnest_fed.founding import Address, found
from ravnest_fed.links import parse_link
from ravnest_fed.parameters import MAX_SHARD
from ravnest_fed.recipe import load_recipe

INPUTS = 12
# The environment says how long a client trains, since a recipe's hash is over its text. The optimiser leaves out what
# torch's own does at first: importing a compiler, for two seconds.
RECIPE = """
import os
import time
import torch
import ravnest_fed as rf

class Descent(torch.optim.Optimizer):
    def __init__(self, parameters):
        self.parameters = parameters
    def zero_grad(self, set_to_none=True):
        for one in self.parameters:
            one.grad = None
    def step(self):
        with torch.no_grad():
            for one in self.parameters:
                one -= 0.05 * one.grad

class Wide(rf.Recipe):
    micro_batch = 8
    local_steps = 2
    def model(self):
        return torch.nn.Linear({inputs}, {width})
    def train_data(self, part):
        return torch.randn(64, {inputs}, generator=torch.Generator().manual_seed(part.index))
    def loss(self, model, batch):
        time.sleep(float(os.environ.get("WIDE_PAUSE", "0")))
        return model(batch).square().mean()
    def optimizer(self, parameters):
        return Descent(parameters)
    def evaluate(self, model):
        return {{"size": float(sum(one.square().sum() for one in model.parameters()))}}
"""


def found_wide(
    folder: Path,
    megabytes: float,
    clients: int = 1,
    addresses: list[Address] | None = None,
    brokers: int = 1,
    **settings: object,
) -> Cluster:
    """A federation whose clients' deltas take about `megabytes` (10^6 bytes), in one shard where that can be."""
    width = round(megabytes * 1e6 / 4 / (INPUTS + 1))
    recipe = folder / "wide.py"
    recipe.write_text(RECIPE.format(inputs=INPUTS, width=width))
    given = {"up": "fp32", "shard_size": MAX_SHARD, "grace_seconds": 0.5, **settings}
    texts = {name: str(value) for name, value in given.items()}
    places = addresses or free_addresses(brokers)
    return Cluster(found(load_recipe(recipe), places, clients, texts, None, folder / "federation"), recipe)


def dial_through(cluster: Cluster, client: str, proxies: Mapping[str, str]) -> None:
    """Let a client reach some brokers, by their names, at other addresses than the federation file's."""
    file = cluster.founded.folder / "members" / f"{client}.link"
    link = parse_link(file.read_text())
    brokers = tuple(
        msgspec.structs.replace(broker, address=proxies.get(broker.name, broker.address)) for broker in link.brokers
    )
    file.write_text(msgspec.structs.replace(link, brokers=brokers).text() + "\n")


def start_with_heartbeat(cluster: Cluster, name: str, interval_ms: int, timeout_ms: int) -> Node:
    """Start a client whose lines have this heartbeat."""
    folder = cluster.founded.folder
    places = [folder / "members" / f"{name}.link", cluster.recipe, folder / "state" / name]
    arguments = [*(str(place) for place in places), str(interval_ms), str(timeout_ms)]
    node = cluster.clients[name] = cluster.start_module(name, ["tests.network.client", *arguments])
    return node
