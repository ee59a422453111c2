"""The contract of import-linter (``make check``) that private names stay in their package; see pyproject.toml."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from importlinter import Contract, ContractCheck, fields, output


class PrivateNamesContract(Contract):
    """No package imports a module or a name of another one that begins with an underscore.

    A private name belongs to the package that its dotted name has in front of it: ``orthocond.linalg._roots`` to
    ``orthocond.linalg``, and ``orthocond._core`` to ``orthocond``, so that all may import it but the sealed ones.

    Options:
        sealed: packages that import nothing private, wherever it is.
        exceptions: lines ``importer -> imported`` that are allowed, with all that is inside of either; one that isn't
            needed breaks the contract, too.
    """

    type_name = "private_names"
    sealed: Any = fields.ListField(subfield=fields.StringField())
    exceptions: Any = fields.SetField(subfield=fields.StringField(), required=False)

    def check(self, graph: Any, verbose: bool) -> ContractCheck:  # what import-linter calls
        (root,) = self.session_options["root_packages"]
        found = set(crossings(Path("src") / root, self.sealed))
        exceptions = {line: {one for one in found if _covers(line, one)} for line in self.exceptions or ()}
        forbidden = sorted(found.difference(*exceptions.values()))
        stale = sorted(line for line, covered in exceptions.items() if not covered)
        return ContractCheck(kept=not (forbidden or stale), metadata={"forbidden": forbidden, "stale": stale})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["forbidden"]:
            output.print_error(f"{line}: private; make it public, or move it to _core", bold=False)
        for line in check.metadata["stale"]:
            output.print_error(f"{line}: an exception that nothing needs; take it out", bold=False)


def crossings(package: Path, sealed: list[str]) -> Iterator[str]:
    """Yield ``importer -> imported`` for each import of a private module or name that its owner doesn't allow."""
    for file in sorted(package.rglob("*.py")):
        parts = [package.name, *file.relative_to(package).with_suffix("").parts]
        importer = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        inside = next((name for name in sealed if f"{importer}.".startswith(f"{name}.")), None)
        for imported in _imported(ast.parse(file.read_text())):
            owner = _owner(imported)
            if owner is None or imported.split(".")[0] != package.name:
                continue
            is_foreign = not f"{importer}.".startswith(f"{owner}.")
            if is_foreign or (inside is not None and not f"{owner}.".startswith(f"{inside}.")):
                yield f"{importer} -> {imported}"


def _covers(exception: str, line: str) -> bool:
    """Return whether an exception allows an import: both are what it names, or inside of that."""
    pairs = zip(exception.split(" -> "), line.split(" -> "), strict=True)
    return all(f"{name}.".startswith(f"{outer}.") for outer, name in pairs)


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a module imports, and the attributes that it takes of imported modules."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                yield alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            base, _, rest = dotted.partition(".")
            if base in modules:
                yield f"{modules[base]}.{rest}"


def _owner(name: str) -> str | None:
    """Return what is in front of the first private part of a dotted name; None where nothing is private."""
    parts = name.split(".")
    private = (i for i, part in enumerate(parts) if part.startswith("_") and not part.endswith("__"))
    place = next(private, None)
    return None if place is None else ".".join(parts[:place])
