"""The documentation: links lead somewhere, commands and examples run, every public name is in the reference.

A block of commands that the tests can't run says so and why, on a line of its own: ``# Not run by the tests: needs a
GPU.`` What it says to ``orthocond`` is parsed nevertheless.
"""

import doctest
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import griffe
import pytest
import torch
from markdown.extensions.toc import slugify

import orthocond.lab.bench.run
import orthocond.lab.cli
import orthocond.lab.report.command
import orthocond.lab.report.item_page
import orthocond.lab.reproduction
import orthocond.lab.train
from orthocond.lab import main
from orthocond.lab.train import Outcome
from orthocond.lab.worker import run as run_here

from docstrings import PUBLIC_MODULES, runtime_docstring
from pages import ROOT, blocks, is_external, links, pages
from registries import readme

PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in pages()}
REFERENCE = {name: text for name, text in PAGES.items() if name.startswith("docs/reference/")}
TESTED_EXAMPLES = {
    name for name in re.findall(r"\w+\.py", (ROOT / "tests" / "test_examples.py").read_text()) if name != "test_docs.py"
}
SHELL = ("sh", "bash", "console")
LANGUAGES = (*SHELL, "python", "toml", "text", "math")
NOT_RUN = re.compile(r"^# Not run by the tests: \w.*\.", re.MULTILINE)
SHORT = ["--steps", "2", "--val-images", "20", "--accelerator", "cpu"]


def computes_in_half_precision(text: str) -> bool:
    examples = "".join(block.text for block in blocks(text) if NOT_RUN.search(block.text) is None)
    return re.search(r"bfloat16|float16|bf16|Muon", examples) is not None


def parametrize_pages(chosen, *, computes=False):
    """Return pages to test; of those whose examples are run, the ones in half precision need a CPU that has it."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(
                name, marks=[pytest.mark.half_products] if computes and computes_in_half_precision(text) else []
            )
            for name, text in PAGES.items()
            if chosen(text)
        ],
    )


# Links


def anchors(page: str) -> set[str]:
    """Return what a link to a page may end with."""
    page = re.sub(r"^\{\{ readme (\w+) \}\}$", lambda found: readme(found[1]), page, flags=re.MULTILINE)
    headings = re.findall(
        r"^#+ +(.+?) *$", re.sub(r"^(`{3,}).*?^\1", "", page, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {slugify(re.sub(r"[`*]", "", heading), "-") for heading in headings} | set(documented_in(page))


@parametrize_pages(lambda text: any(links(text)))
def test_links_lead_somewhere(name):
    page = ROOT / name
    for target in links(PAGES[name]):
        if is_external(target):
            parts = urlsplit(target)
            assert parts.scheme == "https", target
            assert re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", parts.netloc), target
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name} links to {target}"
        assert file.is_relative_to(ROOT / "docs" if name.startswith("docs") else ROOT), f"{target} is not on the site"
        if anchor:
            assert anchor in anchors(file.read_text()), f"{name} links to {target}"


# Commands


def test_every_block_names_its_language():
    found = [
        f"{name}:{block.line}"
        for name, text in PAGES.items()
        for block in blocks(text)
        if block.language not in LANGUAGES
    ]
    assert not found


def commands(text: str) -> list[list[str]]:
    """Return the words of each command in a block, comments left out."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))]


def shell_blocks(text: str, *, run: bool) -> list[list[list[str]]]:
    return [
        commands(block.text)
        for block in blocks(text)
        if block.language in SHELL and (NOT_RUN.search(block.text) is None) == run
    ]


class HereEngine:
    """Does the runs of a sweep one by one in this process."""

    slots = 1

    def __init__(self, *_):
        pass

    def start(self, run):
        self.problem = run_here(run.config.to_json(), str(run.folder))
        return self

    def poll(self):
        return self.problem or ""

    def stop(self):
        pass


def call_orthocond(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["orthocond", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, " ".join(words)


def run_orthocond(words, monkeypatch):
    budget = [] if words[0] not in ("train", "compare", "paper") else SHORT
    for flag in ("--steps", "--accelerator"):
        if flag in words and budget:
            at = budget.index(flag)
            budget = budget[:at] + budget[at + 2 :]
    if "--devices" in words:  # processes that start themselves anew
        return run_process([sys.executable, "-m", "orthocond", *words, *budget], cwd=".")
    return call_orthocond([*words, *budget], monkeypatch)


def run_process(words, cwd):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def check_pip(words, monkeypatch):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] == "install"
    for word in words[1:]:
        project, _, chosen = word.removesuffix("]").partition("[")
        assert project == ".", f"{word} is not the project"
        assert set(filter(None, chosen.split(","))) <= set(extras), word


def run_python(words, monkeypatch):
    if words[0].startswith("examples/"):
        return check_example(words, monkeypatch)
    return run_process([sys.executable, *words], cwd=ROOT)


def check_example(words, monkeypatch):
    """They have a test of their own."""
    (script,) = (word for word in words if word.endswith(".py"))
    assert (ROOT / script).exists()
    assert Path(script).name in TESTED_EXAMPLES, f"{script} has no test"


def check_make(words, monkeypatch):
    run_process(["make", "--dry-run", *words], cwd=ROOT)


PROGRAMS = {
    "orthocond": run_orthocond,
    "make": check_make,  # the targets exist; continuous integration makes them
    "pip": check_pip,  # the extras exist; the package's own test installs it
    "python": run_python,
    "torchrun": check_example,
}


@pytest.mark.timeout(120)
@parametrize_pages(lambda text: shell_blocks(text, run=True), computes=True)
def test_commands_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(orthocond.lab.cli, "LocalEngine", HereEngine)
    for words in (words for block in shell_blocks(PAGES[name], run=True) for words in block):
        program, *rest = words
        assert program in PROGRAMS, f"{name}: {program!r} can't be run by the tests; say '# Not run by the tests: why.'"
        assert not {"&", "|", ">", ";", "&&"} & set(rest), f"{name}: a command by itself, please: {words}"
        PROGRAMS[program](rest, monkeypatch)


def parse_orthocond(words, monkeypatch, folder):
    """Let the command line take its arguments, and stop where it would begin."""
    monkeypatch.chdir(folder)
    finished = Outcome(folder, "finished", 1, None)
    monkeypatch.setattr(orthocond.lab.train, "train", lambda *_, **__: finished)
    for name in ("carry_out", "load_data", "RayEngine"):
        monkeypatch.setattr(orthocond.lab.cli, name, lambda *_: None)
    monkeypatch.setattr(orthocond.lab.cli, "write_report", lambda *_: folder)
    monkeypatch.setattr(orthocond.lab.report.command, "write_report", lambda *_, **__: folder)
    monkeypatch.setattr(orthocond.lab.report.command, "watch_report", lambda *_, **__: folder)
    monkeypatch.setattr(orthocond.lab.bench.run, "run", lambda *_, **__: {"subjects": {}})
    monkeypatch.setattr(orthocond.lab.cli, "compare", lambda *_: [])
    monkeypatch.setattr(orthocond.lab.reproduction, "step_times", lambda *_: None)
    monkeypatch.setattr(orthocond.lab.report.item_page, "write_items", lambda *_: folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    call_orthocond(words, monkeypatch)


@parametrize_pages(lambda text: shell_blocks(text, run=False))
def test_commands_that_are_not_run_are_understood(name, tmp_path, monkeypatch):
    for words in (words for block in shell_blocks(PAGES[name], run=False) for words in block):
        given = [re.sub(r"\$\{?\w+\}?", "1", word) for word in words if word != "&"]
        if "orthocond" in given:
            parse_orthocond(given[given.index("orthocond") + 1 :], monkeypatch, tmp_path)
        elif given[0] == "pip":
            check_pip(given[1:], monkeypatch)
        elif given[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(f"{given[2]}.__main__"), words
        elif given[0] == "python":
            assert (ROOT / given[1]).exists(), words


def test_a_command_that_does_not_exist_is_noticed(tmp_path, monkeypatch, capsys):
    for words in (["train", "dbn-cifar"], ["compare", "dbn-cifar10", "--seed-count", "3"], ["report"]):
        with pytest.raises(AssertionError):
            parse_orthocond(words, monkeypatch, tmp_path)


# Python


def python_blocks(text: str):
    return [block for block in blocks(text) if block.language == "python" and "--8<--" not in block.text]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch's own exporter
@parametrize_pages(python_blocks, computes=True)
def test_python_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {"__name__": "__main__"}
    for block in python_blocks(PAGES[name]):
        if block.text.lstrip().startswith(">>>"):
            run_doctest(block.text, namespace, f"{name}:{block.line}")
        else:
            padding = "\n" * (block.line - 1)  # so that a traceback has the page's line
            exec(compile(padding + block.text, str(ROOT / name), "exec"), namespace)


@parametrize_pages(lambda text: "--8<--" in text)
def test_what_a_page_includes_exists(name):
    marked = re.findall(r'^ *--8<-- "([^"]+)"$|^ *--8<--\n(\S+)\n *--8<--$', PAGES[name], re.MULTILINE)
    for file in ("".join(found) for found in marked):
        path, _, section = file.partition(":")
        assert (ROOT / path).is_file()
        if section:
            assert f"[start:{section}]" in (ROOT / path).read_text()
        if path.endswith(".py"):
            assert Path(path).name in TESTED_EXAMPLES, f"{path} has no test"


def run_doctest(text, namespace, name):
    test = doctest.DocTestParser().get_doctest(text, namespace, name, None, 0)
    report = []
    doctest.DocTestRunner().run(test, out=report.append, clear_globs=False)
    assert not report, "".join(report)


# The reference


def documented_in(page: str) -> list[str]:
    return re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)


DOCUMENTED = [path for text in REFERENCE.values() for path in documented_in(text)]


def resolved(path: str):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.fixture(scope="module")
def package():
    return griffe.load("orthocond", search_paths=[str(ROOT / "src")], resolve_aliases=True)


def docstring_of(path: str, package) -> str:
    entry = package[path.removeprefix("orthocond.")]
    entry = entry.final_target if entry.is_alias else entry
    return entry.docstring.value if entry.docstring else runtime_docstring(path) or ""


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_every_public_name_is_in_the_reference(module):
    shown = [resolved(path) for path in DOCUMENTED]
    for name in importlib.import_module(module).__all__:
        entry = resolved(f"{module}.{name}")
        if inspect.ismodule(entry):
            assert entry.__name__ in PUBLIC_MODULES
        elif name == "__version__":
            assert "orthocond.__version__" in REFERENCE["docs/reference/index.md"]
        else:
            assert any(entry is other for other in shown), f"{module}.{name} is on no page of docs/reference"


def test_nothing_is_in_the_reference_twice():
    assert len(DOCUMENTED) == len({id(resolved(path)) for path in DOCUMENTED})


@pytest.mark.parametrize("path", DOCUMENTED)
def test_every_name_in_the_reference_has_an_example(path, package):
    text = docstring_of(path, package)
    assert ">>> " in text, f"the docstring of {path} has no example"
    if not callable(resolved(path)):  # pytest's doctests don't look at the strings below assignments
        module = importlib.import_module(path.rpartition(".")[0])
        run_doctest(text, dict(vars(module)), path)


@pytest.mark.parametrize("name", ["docstrings", "mathematics", "notebooks", "offline", "pages", "registries"])
def test_what_builds_the_site_does_what_its_examples_say(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
