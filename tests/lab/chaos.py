"""Kill, damage, delete and race at random over train, compare and report, and check what is left after each.

python tests/lab/chaos.py --minutes 10 --seed 0             as many trials as there is time for
python tests/lab/chaos.py --minutes 10 --seed 0 --kind kill as many trials of this kind
python tests/lab/chaos.py --seed 0 --only 17                the trial 17 of this seed again

After each trial: no traceback; a mistake is one sentence; a refusal changed nothing; an error that is shown is the
right one; a finished run and its checkpoints are as they were; a run that came to its end has bitwise the weights of
one that nobody disturbed. It exits with 1 if something was not so.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from unittest import mock

import torch

from orthocond.lab import cli, main, runs
from orthocond.lab.config import changed
from orthocond.lab.display import Silent
from orthocond.lab.presets import preset
from orthocond.lab.train import train

from killing import InProcess, differences

STEPS = 26  # of which 22 are the first epoch
SETTINGS = {"steps": STEPS, "checkpoint_every": 5, "val_images": 50, "threads": 1, "accelerator": "cpu"}
FLAGS = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
METHODS = ("svd+nog+ow+olr", "bn")
KINDS = {"damage": 85, "kill": 13, "race": 2}
"""Kinds of trials, and their shares in percent."""
STAGES = (3, 12, 24)
FILES = (
    "config.json",
    "status.json",
    "environment.json",
    "metrics.jsonl",
    "times.jsonl",
    *runs.CHECKPOINTS,
    "run.lock",
)


def command_line(*arguments):
    """Call the command line in this process; return the exit code, what it said, and its complaints."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    said = ["orthocond", *map(str, arguments)]
    with mock.patch.object(sys, "argv", said), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:  # a traceback, which nobody is to see
            err.write(traceback.format_exc())
            code = 1
    return code, out.getvalue(), err.getvalue()


def content(folder):
    """The files that matter of a run, and their bytes; None for what is no file."""
    return {
        name: (folder / name).read_bytes() if (folder / name).is_file() else None
        for name in FILES
        if name != "run.lock" and os.path.lexists(folder / name)
    }


def in_a_child(arguments, dies_at, errors):
    """Be a process of its own; kill itself in the middle of the ``dies_at``-th write to the disk."""
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    os.dup2(2, 1)
    writes = 0

    def dying(function):
        def call(*values):
            nonlocal writes
            writes += 1
            if writes == dies_at:
                if writes % 2:
                    function(*values)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*values)

        return call

    if dies_at is not None:
        os.replace, os.fsync = dying(os.replace), dying(os.fsync)
        runs.RunFolder.append = dying(runs.RunFolder.append)
    sys.argv = ["orthocond", *map(str, arguments)]
    main()


class Chaos:
    """Trials in a folder; `faults` says what went wrong in which."""

    def __init__(self, folder, seed):
        self.folder, self.seed = Path(folder), seed
        self.counts, self.faults, self.said = Counter(), [], Counter()
        self.context = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
        if hasattr(os, "fork"):
            self.context.set_forkserver_preload(["orthocond.lab.cli", "orthocond.lab.train"])  # what takes long
        torch.set_num_threads(1)
        self.errors = {}
        for method in METHODS:
            for stage in (*STAGES, STEPS):
                path = self.original(method, stage)
                train(changed(preset("dbn-digits"), {**SETTINGS, "method": method}), path, display=_Stopping(stage))
            last = (self.original(method, STEPS) / "metrics.jsonl").read_text().splitlines()[-1]
            self.errors[method] = json.loads(last)["val_error"]

    def original(self, method, stage):
        return self.folder / "originals" / str(stage) / method / "seed-0"

    def trial(self, number, kind=None):
        """One trial, of any kind unless told; everything random in it comes from the seed and its number."""
        self.number, self.draw = number, random.Random(f"{self.seed}-{number}")
        self.method = self.draw.choice(METHODS)
        self.sweep = self.folder / f"trial-{number}"
        self.run = self.sweep / self.method / "seed-0"
        self.log = []
        victim = self.folder / "victim.txt"
        victim.write_text("precious")
        any_kind = self.draw.choices(list(KINDS), list(KINDS.values()))[0]
        try:
            getattr(self, kind or any_kind)()
        except Exception:
            self.fault(f"the trial itself: {traceback.format_exc()}")
        if victim.read_text() != "precious":
            self.fault("a file outside was changed")
        shutil.rmtree(self.sweep, ignore_errors=True)

    def fault(self, what):
        self.faults.append(f"trial {self.number} of seed {self.seed} ({self.method}; {'; '.join(self.log)}): {what}")

    # Damage: to the copy of a run, then commands.

    def damage(self):
        stage = self.draw.choice((*STAGES, STEPS, STEPS, STEPS))
        shutil.copytree(self.original(self.method, stage), self.run)
        self.log.append(f"stage {stage}")
        for _ in range(self.draw.choice((1, 1, 2, 3))):
            self.harm(self.draw.choice(FILES))
        for command in self.draw.sample(("train", "train", "compare", "report"), self.draw.choice((1, 2, 3))):
            getattr(self, f"check_{command}")()

    def harm(self, name):
        file = self.run / name
        harms = [getattr(self, name) for name in dir(self) if name.startswith("harm_")]
        if name.endswith(".pt"):
            harms += [self.craft] * 4
        harm = self.draw.choice(harms)
        if not file.is_file():
            return
        self.counts["damages"] += 1
        self.log.append(f"{harm.__name__} {name}")
        harm(file)

    def harm_flip(self, file):
        data = bytearray(file.read_bytes())
        for _ in range(self.draw.choice((1, 1, 5))):
            if data:
                data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
        file.write_bytes(data)

    def harm_end(self, file):
        """Near its end, where the results are."""
        data = bytearray(file.read_bytes())
        if data:
            data[-self.draw.randrange(1, min(len(data), 200) + 1)] = self.draw.randrange(256)
        file.write_bytes(data)

    def harm_cut(self, file):
        data = file.read_bytes()
        file.write_bytes(data[: self.draw.randrange(len(data) + 1)])

    def harm_zeros(self, file):
        data = bytearray(file.read_bytes())
        start = self.draw.randrange(len(data) + 1)
        data[start : start + 512] = bytes(len(data[start : start + 512]))
        file.write_bytes(data)

    def harm_more(self, file):
        with file.open("ab") as stream:
            stream.write(
                self.draw.choice((b"\n", b"garbage\n", b"\xff\xfe", b"{}\n", b"[" * 50_000, b'{"kind": "epoch"}\n'))
            )

    def harm_nothing_left(self, file):
        file.write_bytes(b"")

    def harm_delete(self, file):
        file.unlink()

    def harm_folder(self, file):
        file.unlink()
        file.mkdir()

    def harm_exchange(self, file):
        other = self.run / self.draw.choice(FILES)
        if other.is_file():
            file.write_bytes(other.read_bytes())

    def harm_line(self, file):
        """Lose, double or exchange lines; in a small JSON file that makes no JSON."""
        lines = file.read_bytes().split(b"\n")
        a, b = self.draw.randrange(len(lines)), self.draw.randrange(len(lines))
        self.draw.choice((lambda: lines.pop(a), lambda: lines.insert(a, lines[b]), lambda: lines.reverse()))()
        file.write_bytes(b"\n".join(lines))

    def harm_value(self, file):
        """Replace a value of a small JSON file."""
        with contextlib.suppress(ValueError):
            values = json.loads(file.read_bytes())
            odd = (None, "abc", -1, 1e9, [], {}, True, "\ud800", "../../victim.txt", 10**400)
            values[self.draw.choice(sorted(values))] = self.draw.choice(odd)
            file.write_text(json.dumps(values))

    def craft(self, file):
        """A checkpoint that is whole, but not as the run wrote it."""
        state = torch.load(file, weights_only=True) if _loads(file) else {}
        victim = os.path.relpath(self.folder / "victim.txt", self.run)
        state |= self.draw.choice(
            (
                {"sizes": {victim: 0}},
                {"sizes": {"metrics.jsonl": 0, "times.jsonl": 0, victim: 0}},
                {"sizes": {"metrics.jsonl": 10**9, "times.jsonl": 0}},
                {"step": 10**9},
                {"step": -1},
                {"step": "7"},
                {"config": {"preset": "dbn-digits"}},
                {"config": None},
                {"model": {}},
                {"model": {"weight": torch.zeros(2)}},
                {"optimizer": {}},
                {"random": {"torch": torch.zeros(3)}},
                {"totals": torch.zeros(1, 2, 3)},
                {"treatment": {"x": 1}},
                {"scheduler": [], "precision": 3},
            )
        )
        torch.save(self.draw.choice((state, state, state, list(state), torch.zeros(2))), file)

    # Kills: of real processes, at a random moment or in the middle of a write.

    def kill(self):
        for _ in range(self.draw.choice((1, 2, 4))):
            dies_at = self.draw.randrange(1, 60) if self.draw.random() < 0.6 else None
            child = self.start(
                "train", "dbn-digits", *FLAGS, "--method", self.method, "--resume", "--out", self.run, dies_at=dies_at
            )
            if dies_at is None:
                child.join(self.draw.uniform(0, 4))
                child.kill()
            child.join()
            self.log.append("finished" if child.exitcode == 0 else f"killed at {dies_at}")
            self.counts["kills"] += child.exitcode == -signal.SIGKILL
            self.check_said(child.exitcode, "", self.said_by_children(), (0, -signal.SIGKILL))
            if self.draw.random() < 0.3:
                self.check_report(may_be_empty=True)
        self.check_train(undamaged=True)
        if differing := differences(self.original(self.method, STEPS), self.run):
            self.fault(f"killed and resumed, it differs in {differing}")

    def race(self):
        self.counts["races"] += 1
        arguments = ("train", "dbn-digits", *FLAGS, "--method", self.method, "--resume", "--out", self.run)
        children = [self.start(*arguments) for _ in range(3)]
        for _ in range(5):
            self.check_report(may_be_empty=True)
        if self.draw.random() < 0.5:
            time.sleep(self.draw.uniform(0, 1))
            if children[0].is_alive():
                children[0].kill()
        for child in children:
            child.join()
            self.counts["kills"] += child.exitcode == -signal.SIGKILL
        errors = self.said_by_children()
        if "Traceback" in errors:
            self.fault(errors)
        if any(child.exitcode not in (0, 2, -signal.SIGKILL) for child in children):
            self.fault(f"exit codes {[child.exitcode for child in children]}: {errors}")
        self.check_train(undamaged=True)
        if differing := differences(self.original(self.method, STEPS), self.run):
            self.fault(f"after a race it differs in {differing}")

    def start(self, *arguments, dies_at=None):
        self.sweep.mkdir(parents=True, exist_ok=True)
        child = self.context.Process(target=in_a_child, args=(arguments, dies_at, str(self.sweep / "said.txt")))
        child.start()
        return child

    def said_by_children(self):
        file = self.sweep / "said.txt"
        said = file.read_text() if file.exists() else ""
        file.unlink(missing_ok=True)
        return said

    # Checks: a command, and what has to hold after it.

    def check_train(self, undamaged=False):
        before, finished = content(self.run), runs.read_status(self.run).get("state") == "finished"
        code, out, errors = command_line(
            "train", "dbn-digits", *FLAGS, "--method", self.method, "--resume", "--out", self.run
        )
        self.check_said(code, out, errors, (0,) if undamaged else (0, 2))
        after = content(self.run)
        refused = code == 2 and "continue with --resume" not in errors
        if refused and {**before, "config.json": 0} != {**after, "config.json": 0}:  # which may be restored
            self.fault(f"it refused, but changed {[n for n in after if before.get(n) != after[n]]}: {errors}")
        names = ("metrics.jsonl", *runs.CHECKPOINTS)
        nothing_done = finished and "continuing from" not in errors
        if nothing_done and code == 0 and any(before.get(name) != after.get(name) for name in names):
            self.fault(f"a finished run was changed: {errors}")
        if code == 0 and not finished and "there is nothing to do" not in errors:
            differing = differences(self.original(self.method, STEPS), self.run)
            if [name for name in differing if name.startswith((".model.", ".optimizer.", ".random."))]:
                self.fault(f"it ended with other weights: {differing}")

    def check_compare(self):
        with mock.patch.object(cli, "LocalEngine", InProcess):
            code, out, errors = command_line(
                "compare", "dbn-digits", *FLAGS, "--methods", self.method, "--seeds", 1, "--out", self.sweep
            )
        self.check_said(code, out, errors, (0, 1, 2))
        rows = [line.split("│") for line in out.splitlines() if line.startswith(f"│{self.method}")]
        if shown := [row[3].strip() for row in rows if len(row) > 3 and row[3].strip()]:
            self.check_error(float(shown[0]))

    def check_report(self, may_be_empty=False):
        kind = self.draw.choice(("json", "json", "csv", "md", "html"))
        output = self.folder / f"report.{kind}"
        output.unlink(missing_ok=True)
        code, out, errors = command_line("report", self.sweep, "-o", output, "--format", kind)
        self.check_said(code, out, errors, (0, 2))
        if code == 0 and kind == "json":
            for experiment in json.loads(output.read_text())["experiments"]:
                for method in experiment["methods"]:
                    if method["error"]["mean"] is not None:
                        self.check_error(method["error"]["mean"])

    def check_said(self, code, out, errors, codes):
        self.counts["commands"] += 1
        self.said[code] += 1
        if code not in codes or "Traceback" in errors:
            self.fault(f"exit code {code}: {out[-500:]}{errors[-3000:]}")
        if code == 2 and sum(line.startswith("orthocond: ") for line in errors.splitlines()) != 1:
            self.fault(f"no sentence: {errors}")
        for shown in re.findall(r"(?:^validation error |seed 0: error )([\d.]+)%", out, flags=re.MULTILINE):
            self.check_error(float(shown))

    def check_error(self, shown):
        if abs(shown - self.errors[self.method]) > 0.00501:
            self.fault(f"the error {shown} is shown, not {self.errors[self.method]}")


class _Stopping(Silent):
    def __init__(self, stage):
        self.stage = stage

    def step(self, record):
        if record["step"] >= self.stage < STEPS:
            signal.raise_signal(signal.SIGTERM)


def _loads(file):
    with contextlib.suppress(Exception):
        return isinstance(torch.load(file, weights_only=True), dict)
    return False


def _main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this trial alone")
    parser.add_argument("--kind", choices=KINDS, help="trials of this kind alone; default: mostly damage, some kills")
    chosen = parser.parse_args()
    os.environ["COLUMNS"] = "200"
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(folder, chosen.seed)
        until, number = time.monotonic() + 60 * chosen.minutes, chosen.only or 0
        while time.monotonic() < until:
            before = len(chaos.faults)
            chaos.trial(number, chosen.kind)
            number += 1
            for fault in chaos.faults[before:]:
                print(fault, end="\n\n", flush=True)
            if chosen.only is not None:
                break
    counts = dict(sorted(chaos.counts.items()))
    print(f"seed {chosen.seed}: {number} trials, {counts}, exit codes {dict(chaos.said)}, {len(chaos.faults)} faults")
    sys.exit(bool(chaos.faults))


if __name__ == "__main__":
    _main()
