"""A run that was stopped and resumed ends in the same bits as one that never stopped."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clients.feed import Position
from clients.progress import ProgressFiles, ProgressUnreadable, StateNotKept
from clients.trainer import Progress
from ravnest_fed.cluster import Cluster
from ravnest_fed.errors import LedgerError
from ravnest_fed.founding import Founded, found
from ravnest_fed.ledger import Ledger
from ravnest_fed.recipe import LoadedRecipe, load_recipe
from ravnest_fed.replica import model_hash
from tests.tiny_federation import free_addresses, until
from tests.trained import Trained

# Every source of state that a client has: an optimiser with momentum, dropout, an order of samples, batch statistics.
RECIPE = """
import os, time
import torch
import ravnest_fed as rf

class Resumed(rf.Recipe):
    micro_batch = 4
    local_steps = 3
    keep_optimizer = True
    def model(self):
        return torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
    def train_data(self, part):
        inputs = torch.randn(22, 6, generator=torch.Generator().manual_seed(part.index))
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        return DATA
    def loss(self, model, batch):
        time.sleep(float(os.environ.get("RESUME_PAUSE", "0")))
        inputs = batch[0] + 0.01 * torch.randn_like(batch[0])
        return torch.nn.functional.mse_loss(model(inputs), batch[1])
    def optimizer(self, parameters):
        return OPTIMIZER
"""
SHUFFLED = "data"
LOADER = "torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)"
ADAM = "torch.optim.AdamW(parameters, lr=0.01)"
SGD = "torch.optim.SGD(parameters, lr=0.05, momentum=0.9)"
ROUNDS = 6


def recipe_in(folder: Path, data: str = SHUFFLED, optimizer: str = ADAM) -> Path:
    path = folder / "resumed.py"
    path.write_text(RECIPE.replace("DATA", data).replace("OPTIMIZER", optimizer))
    return path


@pytest.fixture(params=[(SHUFFLED, ADAM), (LOADER, SGD)], ids=["samples-adam", "loader-sgd"])
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedRecipe:
    return load_recipe(recipe_in(tmp_path, *request.param))


# --- in memory -------------------------------------------------------------------------------------------------------


class Kept:
    """The progress files of every client of a federation in memory."""

    def __init__(self, trained: Trained, folder: Path) -> None:
        self.trained = trained
        self.files = {}
        for name in trained.trainers:
            (folder / name).mkdir(parents=True)
            self.files[name] = ProgressFiles(folder / name, trained.joined.federation.fingerprint)

    def round(self) -> None:
        """A round to its commit, with every client's progress."""
        base_round = self.trained.server_round
        self.trained.round()
        for name in self.trained.trainers:
            self.save(name, base_round)

    def save(self, name: str, base_round: int) -> None:
        """Save what the client has after training on the model of `base_round`."""
        self.files[name].save(base_round, bytes(32), self.trained.trainers[name].progress)

    def restart(self, name: str) -> None:
        """The client's process is another one now, with what lies on its disk."""
        trainer = self.trained.new_trainer(name)
        trainer.progress = self.files[name].before(self.trained.server_round) or Progress()
        self.trained.trainers[name] = trainer


def hashes(trained: Trained) -> bytes:
    return model_hash(trained.schema, trained.state)


def test_clients_that_stop_after_any_round_change_no_bit(loaded: LoadedRecipe, tmp_path: Path) -> None:
    calm = Trained(loaded, clients=2)
    expected = []
    for _ in range(ROUNDS):
        calm.round()
        expected.append(hashes(calm))
    assert len(set(expected)) == ROUNDS
    for stop in range(ROUNDS):
        kept = Kept(Trained(loaded, clients=2), tmp_path / str(stop))
        for number in range(ROUNDS):
            if number == stop:
                for name in kept.trained.trainers:
                    kept.restart(name)
            kept.round()
            assert hashes(kept.trained) == expected[number], f"stopped after {stop}, differs in {number + 1}"


def test_without_its_progress_a_client_gives_other_bits(loaded: LoadedRecipe) -> None:
    """The tests above can fail."""
    calm, forgetful = Trained(loaded, clients=2), Trained(loaded, clients=2)
    for trained in (calm, forgetful):
        trained.round()
    forgetful.trainers["c1"] = forgetful.new_trainer("c1")
    for trained in (calm, forgetful):
        trained.round()
    assert hashes(calm) != hashes(forgetful)


def test_a_kill_after_training_but_before_the_offer_changes_no_bit(loaded: LoadedRecipe, tmp_path: Path) -> None:
    calm = Trained(loaded, clients=2)
    for _ in range(3):
        calm.round()
    kept = Kept(Trained(loaded, clients=2), tmp_path)
    for _ in range(2):
        kept.round()
    kept.trained.work("c1")
    kept.save("c1", 2)
    kept.restart("c1")
    kept.round()
    assert hashes(kept.trained) == hashes(calm)


@pytest.mark.parametrize(
    "optimizer",
    [
        "torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)",
        "torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)",
        "torch.optim.Adagrad(parameters)",
        "torch.optim.RMSprop(parameters, centered=True)",
        "torch.optim.Adam(parameters, lr=torch.tensor(0.01))",
        "torch.optim.AdamW([{'params': parameters[:2]}, {'params': parameters[2:], 'lr': 0.1}], betas=(0.5, 0.9))",
    ],
)
def test_every_optimisers_state_comes_back_as_it_was(optimizer: str, tmp_path: Path) -> None:
    trained = Trained(load_recipe(recipe_in(tmp_path, optimizer=optimizer)), clients=1)
    trained.round()
    progress = trained.trainers["c1"].progress
    files = ProgressFiles(tmp_path, bytes(32))
    files.save(0, bytes(32), progress)
    back = files.before(1)
    assert back is not None and back.position == progress.position
    assert alike(back.optimizer_state, progress.optimizer_state)


def alike(one: object, other: object) -> bool:
    """Whether two trees hold the same types, values and bits."""
    if type(one) is not type(other):
        return False
    match one:
        case torch.Tensor():
            return one.dtype == other.dtype and torch.equal(one, other)  # type: ignore[attr-defined,arg-type]
        case dict():
            return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)  # type: ignore
        case list() | tuple():
            return len(one) == len(other) and all(map(alike, one, other))  # type: ignore[arg-type]
    return one == other


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> ProgressFiles:
    return ProgressFiles(tmp_path, b"f" * 32)


def at(drawn: int) -> Progress:
    return Progress(Position(1, drawn))


def test_a_base_is_trained_with_the_progress_before_it(files: ProgressFiles, tmp_path: Path) -> None:
    assert files.before(0) is None
    for base in (0, 1, 4):
        files.save(base, bytes([base]) * 32, at(base))
    assert len(list(tmp_path.iterdir())) == 2
    assert files.before(4) == at(1)
    assert files.before(5) == files.before(9) == at(4)
    files.save(4, bytes(32), at(40))
    assert (files.before(4), files.before(5)) == (at(1), at(40))
    # An older base, since every broker lost what came after it: what was made later is no more.
    files.save(2, bytes(32), at(2))
    assert (files.before(2), files.before(9)) == (at(1), at(2))


def test_progress_on_another_commit_is_removed(files: ProgressFiles) -> None:
    for base in (3, 4):
        files.save(base, bytes([base]) * 32, at(base))
    files.check(4, bytes([4]) * 32)
    assert files.before(5) == at(4)
    files.check(4, bytes([5]) * 32)
    files.check(7, bytes(32))
    assert files.before(5) == at(3)


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:30], lambda data: b"\xff" * len(data)])
def test_a_damaged_file_is_named_and_costs_no_more_than_the_progress(
    files: ProgressFiles, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    files.save(3, bytes(32), at(3))
    file = tmp_path / "progress-3.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ProgressUnreadable, match=r"progress-3\.safetensors"):
        files.before(4)
    with pytest.raises(ProgressUnreadable):
        files.check(3, bytes(32))
    assert files.before(4) is None


def test_progress_in_another_federation_does_not_count(files: ProgressFiles, tmp_path: Path) -> None:
    files.save(3, bytes(32), at(3))
    with pytest.raises(ProgressUnreadable, match="another federation"):
        ProgressFiles(tmp_path, b"g" * 32).before(4)


def test_what_no_file_keeps_is_named(files: ProgressFiles) -> None:
    with pytest.raises(StateNotKept, match="holds a object"):
        files.save(0, bytes(32), Progress(Position(), {"state": {0: object()}}))
    assert files.before(1) is None


def test_no_pickle_is_read(files: ProgressFiles, tmp_path: Path) -> None:
    torch.save({"state": 1}, tmp_path / "progress-3.safetensors")
    with pytest.raises(ProgressUnreadable):
        files.before(4)


# --- on real processes -----------------------------------------------------------------------------------------------


def founded_in(folder: Path) -> tuple[Founded, Path]:
    folder.mkdir()
    recipe = recipe_in(folder)
    settings = {"stop.rounds": str(ROUNDS), "rounds.min_contributions": "2"}
    return found(load_recipe(recipe), free_addresses(3), 2, settings, None, folder / "federation"), recipe


def chain(founded: Founded) -> list[bytes]:
    """The hashes of the models that b1 committed, in order."""
    try:
        ledger = Ledger(founded.broker_folders[0], founded.federation.fingerprint, create=False)
    except LedgerError:
        return []
    found = [body.model_hash for _, body in ledger.commits()]
    ledger.close()
    return found


def ended(cluster: Cluster) -> bool:
    return len(chain(cluster.founded)) == ROUNDS and not any(node.alive for node in cluster.clients.values())


@pytest.mark.processes
@pytest.mark.long
def test_every_process_is_killed_twice_and_the_run_ends_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    founded, recipe = founded_in(tmp_path / "calm")
    with Cluster(founded, recipe) as cluster:
        cluster.start()
        until(lambda: ended(cluster), "the calm run ends")
    expected = chain(founded)
    # Slow enough to be killed at work.
    monkeypatch.setenv("RESUME_PAUSE", "0.1")
    founded, recipe = founded_in(tmp_path / "killed")
    with Cluster(founded, recipe) as cluster:
        cluster.start()
        for goal in (1, 4):
            until(lambda goal=goal: len(chain(founded)) >= goal, f"round {goal} is committed")  # type: ignore[misc]
            for name in (*cluster.clients, *cluster.brokers):
                cluster.kill(name)
            assert len(chain(founded)) < ROUNDS
            cluster.start()
        until(lambda: ended(cluster), "the killed run ends")
    assert chain(founded) == expected
    assert len(set(expected)) == ROUNDS
