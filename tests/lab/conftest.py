"""What the laboratory's tests share."""

import sys
from typing import NamedTuple

import pytest

from orthocond.lab import main


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command_line(capsys, monkeypatch):
    """The command line, in this process."""

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["orthocond", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(ended.value.code or 0, *capsys.readouterr())

    return called
