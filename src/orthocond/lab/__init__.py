"""The laboratory: models, data, training, benchmarks and the command line, on top of the library's public names."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or report the missing package."""
    try:
        from orthocond.lab.cli import main as run
    except ModuleNotFoundError as error:
        from orthocond.lab.installing import install_command

        sys.exit(f"orthocond: the laboratory needs {error.name}; install it with: {install_command('lab')}")
    run()
