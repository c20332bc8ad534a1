"""`ravnest-fed export`: the model as a safetensors file."""

from pathlib import Path

import click

from ravnest_fed.commands.failing import failing_cleanly
from ravnest_fed.commands.options import debug_option, folder_argument
from ravnest_fed.errors import UsageError
from ravnest_fed.federation import INITIAL_MODEL
from ravnest_fed.verification import furthest, newest


@click.command()
@folder_argument
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The file to write.")
@debug_option
@failing_cleanly
def export(folder: Path, out: Path, debug: bool) -> None:
    """Write the newest model of the ledgers in FOLDER as safetensors, for the recipe's model().load_state_dict."""
    import safetensors.torch

    from ravnest_fed.model_files import write_durably
    from ravnest_fed.model_state import export_state_dict

    if not out.parent.is_dir():
        raise UsageError(f"there is no directory {out.parent}", "make it first")
    source = furthest(folder)
    replica = newest(source)
    initial = safetensors.torch.load_file(source / INITIAL_MODEL)
    tensors = export_state_dict(replica.schema, replica.state, initial)
    metadata = {
        "federation": replica.federation.fingerprint.hex(),
        "server_round": str(replica.head.server_round),
        "model_hash": replica.head.model_hash.hex(),
    }
    write_durably(out, safetensors.torch.save({name: one.contiguous() for name, one in tensors.items()}, metadata))
    click.echo(f"wrote {out}: round {replica.head.server_round}, model hash {replica.head.model_hash.hex()}")
