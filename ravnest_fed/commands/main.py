"""`ravnest-fed`: the command line of operators."""

import click

from ravnest_fed.commands.demo import demo
from ravnest_fed.commands.export import export
from ravnest_fed.commands.init import init
from ravnest_fed.commands.recover import recover
from ravnest_fed.commands.roster import roster
from ravnest_fed.commands.status import status
from ravnest_fed.commands.verify import verify


@click.group()
@click.version_option(package_name="ravnest-fed")
def cli() -> None:
    """Train one PyTorch model together on machines you own: several brokers, no master."""


for command in (init, demo, status, export, verify, roster, recover):
    cli.add_command(command)


def main() -> None:
    """Entry point of the console command."""
    cli(prog_name="ravnest-fed")


if __name__ == "__main__":
    main()
