"""`ravnest-fed init`: make a federation."""

import contextlib
from datetime import UTC, datetime
from pathlib import Path

import click

from ravnest_fed.commands.failing import failing_cleanly
from ravnest_fed.commands.options import debug_option, set_option, settings_from
from ravnest_fed.errors import UsageError


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--broker", "brokers", multiple=True, required=True, metavar="HOST:PORT", help="A broker; several times.")
@click.option("--clients", type=click.IntRange(0, 100_000), default=0, help="How many member links to make.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to make.")
@click.option("--from", "weights", type=click.Path(path_type=Path), help="Start from these safetensors weights.")
@click.option("--rounds", type=click.IntRange(1), help="Stop after this many rounds.")
@click.option("--until", metavar="DATE", help="Stop at a date, such as 2030-01-31T18:00:00+00:00.")
@click.option("--until-metric", metavar="NAME>=X", help="Stop once a metric is reached: accuracy>=0.97 or loss<=0.1.")
@set_option
@debug_option
@failing_cleanly
def init(
    recipe: Path,
    brokers: tuple[str, ...],
    clients: int,
    out: Path,
    weights: Path | None,
    rounds: int | None,
    until: str | None,
    until_metric: str | None,
    pairs: tuple[str, ...],
    debug: bool,
) -> None:
    """Make a federation that trains RECIPE over the brokers at the given addresses.

    The brokers reach each other at the port after the one that clients use; HOST:PORT:PORT names both.
    """
    from ravnest_fed.founding import Address, found
    from ravnest_fed.recipe import load_recipe

    settings = settings_from(pairs)
    if rounds:
        settings["stop.rounds"] = str(rounds)
    if until:
        settings["stop.date"] = f'"{until}"'
        with contextlib.suppress(ValueError, TypeError):
            if datetime.fromisoformat(until) <= datetime.now(UTC):
                raise UsageError(f"--until {until} is past", "name a date to come")
    if until_metric:
        settings.update(_metric_bound(until_metric))
    addresses = [Address.parse(text) for text in brokers]
    made = found(load_recipe(recipe), addresses, clients, settings, weights, out)
    click.echo(f"made the federation {made.federation.federation.name!r} in {out}")
    click.echo(
        f"fingerprint {made.federation.fingerprint.hex()[:32]}, {made.federation.schema.parameter_count} parameters"
    )
    for folder, address in zip(made.broker_folders, addresses, strict=True):
        click.echo(f"copy {folder} to {address.host} and run there: ravnest-broker run {folder.name}")
    for file in made.link_files[:8]:
        click.echo(f"a member joins with: ravnest-client join {file} --recipe {recipe}")
    if len(made.link_files) > 8:
        click.echo(f"... and {len(made.link_files) - 8} more links in {made.link_files[0].parent}")
    if len(addresses) == 2:
        click.echo("note: two brokers stop when either is lost; three go on with two", err=True)
    click.echo("keep operator.key and the links secret", err=True)


def _metric_bound(text: str) -> dict[str, str]:
    for sign, bound in ((">=", "stop.at_least"), ("<=", "stop.at_most")):
        name, found, value = text.partition(sign)
        if found and name.strip():
            try:
                return {"stop.metric": f'"{name.strip()}"', bound: str(float(value))}
            except ValueError:
                break
    raise UsageError(f"--until-metric {text!r} is no bound", "write it like accuracy>=0.97")
