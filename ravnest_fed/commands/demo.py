"""`ravnest-fed demo`: a whole federation on this machine, on real data, over real sockets."""

import asyncio
import json
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from ravnest_fed.cluster import Cluster, free_addresses
from ravnest_fed.commands.failing import failing_cleanly
from ravnest_fed.commands.options import debug_option, set_option, settings_from
from ravnest_fed.commands.round_table import RoundView, readable_bytes
from ravnest_fed.commands.summary import Summary
from ravnest_fed.errors import ClusterError, RecipeError, UsageError

POLL_SECONDS = 0.25
FINAL_SECONDS = 10.0


@click.command()
@click.option("--brokers", type=click.IntRange(1, 16), default=3, show_default=True)
@click.option("--clients", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True)
@click.option(
    "--recipe", type=click.Path(path_type=Path), help="A recipe file or folder, or an example's name. [digits]"
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the initial model and the data split.")
@click.option("--topology", type=click.Choice(["butterfly", "parameter-server"]), help="[by the number of brokers]")
@click.option("--summary", type=click.Path(path_type=Path, dir_okay=False), help="Write what happened as JSON.")
@click.option(
    "--keep", type=click.Path(path_type=Path), help="Leave the federation's folder, with ledgers and logs, here."
)
@set_option
@debug_option
@failing_cleanly
def demo(
    brokers: int,
    clients: int,
    rounds: int,
    recipe: Path | None,
    seed: int,
    topology: str | None,
    summary: Path | None,
    keep: Path | None,
    pairs: tuple[str, ...],
    debug: bool,
) -> None:
    """Train a recipe with several broker and client processes on this machine, over loopback."""
    settings = {"stop.rounds": str(rounds), "federation.seed": str(seed), **settings_from(pairs)}
    if topology:
        settings["federation.topology"] = topology
        if topology == "parameter-server" and brokers != 1:
            brokers = 1
    if summary is not None and not summary.parent.is_dir():
        raise UsageError(f"there is no directory {summary.parent}", "make it first")
    for name in ("SIGTERM", "SIGHUP"):  # Windows has no hang-up
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _interrupt)
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ravnest-fed-"))) / "federation"
        result = _run(_recipe_path(recipe), brokers, clients, settings, folder)
    if summary is not None:
        summary.write_text(json.dumps(result.json(), indent=1) + "\n")
    _last_line(result, keep)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _recipe_path(recipe: Path | None) -> Path:
    name = recipe or Path("digits")
    if name.exists():
        return name
    shipped = Path(str(files("examples"))) / name
    if len(name.parts) == 1 and shipped.is_dir():
        return shipped
    raise RecipeError(f"there is no recipe {name}", "name a recipe file or folder, or an example: digits, char_lm")


def _run(recipe: Path, brokers: int, clients: int, settings: dict[str, str], folder: Path) -> Summary:
    try:
        from ravnest_fed.founding import found
        from ravnest_fed.recipe import load_recipe

        loaded = load_recipe(recipe)
        founded = found(loaded, free_addresses(brokers), clients, settings, None, folder)
    except ModuleNotFoundError as error:
        raise UsageError(f"the demo needs {error.name}", "install ravnest-fed[examples]") from error
    title = (
        f"{loaded.name}: {brokers} brokers, {clients} clients, {founded.federation.schema.parameter_count} parameters"
    )
    with Cluster(founded, recipe) as cluster, RoundView(title) as view:
        cluster.start()
        return asyncio.run(_follow(cluster, view))


async def _follow(cluster: Cluster, view: RoundView) -> Summary:
    from ravnest_fed.founding import OPERATOR_KEY
    from ravnest_fed.identity import Identity
    from ravnest_fed.net.asking import Asker

    federation = cluster.founded.federation
    operator = Identity.load(cluster.founded.folder / OPERATOR_KEY)
    result = Summary(federation)
    shown = 0
    ended_at: float | None = None
    async with Asker(federation, operator) as asker:
        while True:
            result.take(await asker.ask(result.known(), 1.0))
            _note_deaths(cluster, result, view)
            cluster.check_brokers()
            done = _complete(cluster, result)
            while shown < result.server_round and (shown + 1 < result.server_round or done):
                shown += 1
                view.add(result.round_entry(shown))
            if done:
                view.state("training has ended")
                return result
            if result.stop and ended_at is None:
                ended_at = time.monotonic()
            if ended_at is not None and time.monotonic() - ended_at > FINAL_SECONDS:
                laggards = sorted(set(cluster.clients) - result.holding(result.server_round) - result.dead)
                view.note(f"not waited for any longer: {', '.join(laggards) or 'a broker'}")
                for late in range(shown + 1, result.server_round + 1):
                    view.add(result.round_entry(late))
                return result
            view.state(next((f"{name}: {status.waiting}" for name, status in result.latest.items()), "starting"))
            await asyncio.sleep(POLL_SECONDS)


def _complete(cluster: Cluster, result: Summary) -> bool:
    """Whether every living node is known to stand at the last round of a training that ended."""
    if not result.stop:
        return False
    last = result.server_round
    living = [name for name, node in cluster.brokers.items() if node.alive]
    level = all(name in result.latest and result.latest[name].server_round == last for name in living)
    return level and set(cluster.clients) - result.dead <= result.holding(last)


def _note_deaths(cluster: Cluster, result: Summary, view: RoundView) -> None:
    for name, node in (cluster.brokers | cluster.clients).items():
        died = not node.alive and (node.process.returncode != 0 or name in cluster.brokers)
        if died and name not in result.dead:
            result.dead.add(name)
            view.note(f"{name} died (status {node.process.returncode}): {node.last_words()}")
    if cluster.clients and all(name in result.dead for name in cluster.clients) and not result.stop:
        node = next(iter(cluster.clients.values()))
        raise ClusterError(f"every client died; {node.name}: {node.last_words()}", f"see {node.log.parent}")


def _last_line(result: Summary, keep: Path | None) -> None:
    data = result.json()
    last = data["final"]["server_round"]
    hashes = {one["model_hash"] for one in data["brokers"].values() if not one["died"]}
    behind = sorted(
        name
        for name, one in (data["brokers"] | data["clients"]).items()
        if not one["died"] and one["server_round"] != last
    )
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in sorted(data["final"]["metrics"].items()))
    moved = readable_bytes(sum(one["bytes_up"] + one["bytes_down"] for one in data["rounds"]))
    agree = "every living replica holds the same model" if len(hashes) == 1 and not behind else "replicas differ"
    if behind:
        agree = f"behind: {', '.join(behind)}"
    dead = f"; died: {', '.join(sorted(result.dead))}" if result.dead else ""
    click.echo(
        f"round {last}: {metrics or 'no metrics'}; {agree} ({data['final']['model_hash'][:12]}); {moved} moved{dead}"
    )
    if keep is not None:
        click.echo(f"the federation is in {keep}")
    if len(hashes) != 1 or behind:
        sys.exit(ClusterError.exit_status)
