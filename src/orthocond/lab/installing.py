"""How to add what is missing: the command depends on where this installation came from."""

import json
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

__all__ = ["install_command"]


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package from where the package itself was installed.

    `pip` records that in ``direct_url.json``, unless it was the package index: a clone, a repository, an archive.
    """
    try:
        recorded = metadata.distribution("orthocond").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # the sources alone, on the path of Python
        root = Path(__file__).parents[3]
        return _from_folder(root, extra, editable=True) if (root / "pyproject.toml").is_file() else _named(extra)
    origin = json.loads(recorded) if recorded else {}
    if "dir_info" in origin:
        folder = Path(url2pathname(urlsplit(origin["url"]).path))
        return _from_folder(folder, extra, editable=origin["dir_info"].get("editable", False))
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        return _named(extra, f" @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}")
    return _named(extra, f" @ {origin['url']}" if origin else "")


def _named(extra: str, where: str = "") -> str:
    return f"pip install {shlex.quote(f'orthocond[{extra}]{where}')}"


def _from_folder(folder: Path, extra: str, *, editable: bool) -> str:
    place = "." if folder == Path.cwd() else str(folder)
    return f"pip install {'-e ' if editable else ''}{shlex.quote(f'{place}[{extra}]')}"
