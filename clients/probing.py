"""`ravnest-client probe`: measures, or remembers, and shows it as a table or as JSON."""

import contextlib
import json
import sys
from pathlib import Path

import click
from platformdirs import user_data_path
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clients.amounts import parse_bytes
from ravnest_fed.capability import Capability, as_tables
from ravnest_fed.commands.failing import failing_cleanly
from ravnest_fed.commands.round_table import readable_bytes
from ravnest_fed.errors import UsageError
from ravnest_fed.partition import Partition


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--device", default="auto", show_default=True, help="A torch device, such as cpu, cuda:0 or mps.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads for training; torch's own choice by default.")
@click.option(
    "--seconds", type=click.FloatRange(0.1, 600), default=10.0, show_default=True, help="How long to measure, about."
)
@click.option("--fresh", is_flag=True, help="Measure again, even if this machine was measured before.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--state", type=click.Path(path_type=Path, file_okay=False), help="Where to remember what was measured.")
@click.option("--max-gpu-memory", metavar="BYTES", help="Most GPU memory to take, such as 6GB; all by default.")
@click.option("--part", hidden=True, help="INDEX/COUNT/SEED of the part of the data; all of it by default.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@failing_cleanly
def probe(
    recipe: Path,
    device: str,
    threads: int | None,
    seconds: float,
    fresh: bool,
    as_json: bool,
    state: Path | None,
    max_gpu_memory: str | None,
    part: str | None,
    debug: bool,
) -> None:
    """Measure what this machine can do with RECIPE, and say why each number is what it is."""
    import torch

    from clients.devices import chosen, limit_gpu_memory, machine
    from clients.probe import capability_of, measure
    from clients.remembered import Key, RememberedProbes
    from ravnest_fed.recipe import load_recipe

    if threads:
        torch.set_num_threads(threads)
    on = chosen(device)
    most = parse_bytes(max_gpu_memory, "--max-gpu-memory") if max_gpu_memory else None
    limit_gpu_memory(device, most)
    # What a recipe prints must not stand among the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        loaded = load_recipe(recipe)
        partition = _partition(part or f"0/1/{loaded.recipe.seed}")
        key = Key(
            loaded.hash,
            machine(),
            f"{on} within {most}" if most else str(on),
            f"{partition.index}/{partition.count}/{partition.seed}",
        )
        memory = RememberedProbes(state or user_data_path("ravnest-fed"))
        known = None if fresh else memory.find(key)
        climbed = known or measure(loaded, partition, on, seconds)
    if known is None:
        try:
            memory.keep(key, climbed)
        except OSError as error:
            click.echo(f"not remembered: {error}", err=True)
    capability = capability_of(climbed, on)
    if as_json:
        tables = {
            "recipe": loaded.name,
            "recipe_hash": loaded.hash,
            "remembered": known is not None,
            **as_tables(capability),
        }
        click.echo(json.dumps(tables, indent=2))
    else:
        show(capability, loaded.name, known is not None, Console(highlight=False))


def _partition(text: str) -> Partition:
    try:
        index, count, seed = (int(number) for number in text.split("/"))
        return Partition(index, count, seed)
    except ValueError:
        raise UsageError(f"{text[:60]!r} is no part of the data", "write it like 0/4/7: index, count, seed") from None


def show(capability: Capability, recipe: str, remembered: bool, console: Console) -> None:
    """The capability as tables: the machine, the speeds, and the numbers with their reasons."""
    reasons = capability.reasons
    machine = Table(title="this machine", title_justify="left")
    for column in ("device", "name", "memory", "free", "busy", "driver"):
        machine.add_column(column)
    for device in capability.devices:
        busy = "" if device.utilisation is None else f"{device.utilisation:.0f} %"
        sizes = [_size(device.memory_total), _size(device.memory_free)]
        machine.add_row(Text(device.kind), Text(device.name), *sizes, busy, Text(device.driver))
    console.print(machine)
    when = "remembered; --fresh measures again" if remembered else "measured now"
    console.print(Text(f"{recipe} on {capability.device}, {when}"))
    speeds = Table()
    speeds.add_column("micro-batch", justify="right")
    speeds.add_column("samples/s", justify="right")
    for speed in capability.speeds:
        chosen = " *" if speed.micro_batch == capability.micro_batch else ""
        speeds.add_row(f"{speed.micro_batch}{chosen}", f"{speed.samples_per_second:.1f}")
    console.print(speeds)
    power = "on battery" if capability.on_battery else "plugged in"
    numbers = {
        "device": ("device", capability.device),
        "micro_batch": ("micro-batch", str(capability.micro_batch) if capability.speeds else "none"),
        "max_micro_batch": ("fits", str(capability.max_micro_batch or "")),
        "speeds": ("largest tried", str(capability.speeds[-1].micro_batch) if capability.speeds else "none"),
        "cores": ("cores", str(capability.cores or "")),
        "memory_total": ("memory", f"{_size(capability.memory_total)}, {_size(capability.memory_free)} free"),
        "battery": ("battery", "" if capability.battery is None else f"{capability.battery:.0f} %, {power}"),
        "bandwidth_up": ("upload", _rate(capability.bandwidth_up)),
        "bandwidth_down": ("download", _rate(capability.bandwidth_down)),
    }
    table = Table(title="what a work order may ask for", title_justify="left")
    for column in ("number", "value", "why"):
        table.add_column(column)
    for name, (label, value) in numbers.items():
        table.add_row(label, Text(value), Text(reasons.get(name, "")))
    console.print(table)


def _size(count: int | None) -> str:
    return "" if count is None else readable_bytes(count)


def _rate(bytes_a_second: float | None) -> str:
    return "not measured" if bytes_a_second is None else f"{readable_bytes(int(bytes_a_second))}/s"
