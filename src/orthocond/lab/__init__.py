"""The laboratory: models, data, training, benchmarks and the command line, on top of the library's public names."""

from orthocond_command import main

__all__ = ["main"]
