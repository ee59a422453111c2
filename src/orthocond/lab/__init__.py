"""The laboratory: models, data, training, benchmarks and the command line, on top of the library's public names."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say what it needs."""
    try:
        from orthocond.lab.cli import main as run
    except ModuleNotFoundError as error:
        sys.exit(f"orthocond: the laboratory needs {error.name}; install it by: pip install 'orthocond[lab]'")
    run()
