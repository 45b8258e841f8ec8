"""``kvtransfer``: registers the subcommands and turns errors into one line and an exit code."""

from __future__ import annotations

import sys

import typer

from kvtransfer import __version__
from kvtransfer.cli import bench, doctor, plan, plot, profile, replay, simulate, store, workload
from kvtransfer.errors import KVTransferError

__all__ = ["app", "main"]

app = typer.Typer(
    help="KV-cache loading over both paths (DualPath).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("replay")(replay.replay)
app.command("profile")(profile.profile)
app.command("plot")(plot.plot)
app.command("simulate")(simulate.simulate)
app.command("doctor")(doctor.doctor)
app.add_typer(workload.app, name="workload")
app.add_typer(bench.app, name="bench")
app.add_typer(store.app, name="store")
app.add_typer(plan.app, name="plan")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Exit codes: 0 fine, 1 the run or its verification failed, 2 bad input, 130 interrupted."""
    try:
        app(standalone_mode=True)
    except KVTransferError as error:
        print(f"kvtransfer: error: {error}", file=sys.stderr)
        sys.exit(1 if error.code == "cluster" else 2)
    except KeyboardInterrupt:
        print("kvtransfer: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
