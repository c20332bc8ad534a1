"""`ravnest-fed demo`: a whole federation on this machine, on real data, over real sockets."""

import asyncio
import json
import signal
import sys
import tempfile
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from ravnest_fed.chaos import Chaos, schedule
from ravnest_fed.cluster import Cluster, free_addresses
from ravnest_fed.commands import chaos_report
from ravnest_fed.commands.failing import failing_cleanly
from ravnest_fed.commands.following import follow
from ravnest_fed.commands.options import debug_option, set_option, settings_from
from ravnest_fed.commands.round_table import RoundView, readable_bytes
from ravnest_fed.commands.summary import Summary
from ravnest_fed.errors import ClusterError, RecipeError, UsageError
from ravnest_fed.federation import Federation
from ravnest_fed.verification import lost_rounds


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
@click.option("--chaos", type=int, metavar="SEED", help="Kill and restart brokers and clients, as SEED draws.")
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
    chaos: int | None,
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
        result = _run(_recipe_path(recipe), brokers, clients, settings, folder, chaos)
        lost = lost_rounds(folder, result.told()) if chaos is not None else []
    if summary is not None:
        summary.write_text(json.dumps(result.json(), indent=1) + "\n")
    for line in chaos_report.cost(result.json(), lost) if chaos is not None else ():
        click.echo(line)
    _last_line(result, keep, lost)


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


def _run(recipe: Path, brokers: int, clients: int, settings: dict[str, str], folder: Path, seed: int | None) -> Summary:
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
    chaos = None if seed is None else _chaos(seed, founded.federation)
    with Cluster(founded, recipe) as cluster, RoundView(title) as view:
        cluster.start()
        return asyncio.run(follow(cluster, view, chaos))


def _chaos(seed: int, federation: Federation) -> Chaos:
    brokers = [one.name for one in federation.brokers]
    clients = [one.name for one in federation.members]
    strikes = schedule(seed, federation.stop.rounds, brokers, clients)
    if not strikes:
        raise UsageError(
            f"{len(brokers)} brokers and {len(clients)} clients over {federation.stop.rounds} rounds leave nothing to kill",
            "--chaos needs three brokers or two clients, and three rounds",
        )
    return Chaos(strikes, set(brokers), set(clients))


def _last_line(result: Summary, keep: Path | None, lost: list[int]) -> None:
    data = result.json()
    final = data["final"]
    living = {name: one for name, one in (data["brokers"] | data["clients"]).items() if not one["died"]}
    behind = sorted(name for name, one in living.items() if one["server_round"] != final["server_round"])
    differing = sorted(name for name in living.keys() - behind if living[name]["model_hash"] != final["model_hash"])
    words = [f"behind: {', '.join(behind)}"] if behind else []
    words += [f"another model: {', '.join(differing)}"] if differing else []
    agree = "; ".join(words) or "every living replica holds the same model"
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in sorted(final["metrics"].items()))
    moved = readable_bytes(sum(one["bytes_up"] + one["bytes_down"] for one in data["rounds"]))
    dead = f"; died: {', '.join(sorted(result.dead))}" if result.dead else ""
    click.echo(
        f"round {final['server_round']}: {metrics or 'no metrics'}; {agree} ({final['model_hash'][:12]}); "
        f"{moved} moved{dead}"
    )
    if keep is not None:
        click.echo(f"the federation is in {keep}")
    if behind or differing or lost:
        sys.exit(ClusterError.exit_status)
