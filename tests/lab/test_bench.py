"""The benchmark: that it runs, that its figures are sane, and that it judges by the truth; never how fast it is."""

import json
import sys

import pytest
import torch

from orthocond import linalg
from orthocond.lab import processor
from orthocond.lab.bench import functions, layers, peers, polar, solvers, step
from orthocond.lab.bench.measure import Budget, alternate, saved_bytes
from orthocond.lab.bench.page import main as page_main
from orthocond.lab.bench.page import write_page
from orthocond.lab.bench.problems import EPS, SPECTRA, oracle, polar_factor, problem
from orthocond.lab.bench.promises import promises
from orthocond.lab.bench.run import SUBJECTS, BenchError, read_results, write_results
from orthocond.lab.bench.tables import tables

import oracle as truth
from cases import noise


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A quick run of everything, as a user has it."""
    from typer.testing import CliRunner

    from orthocond.lab.cli import app

    file = tmp_path_factory.mktemp("bench") / "new" / "quick.json"
    done = CliRunner().invoke(app, ["bench", "--quick", "--json", str(file)])
    assert done.exit_code == 0, done.output
    return file, done.output


@pytest.fixture(scope="module")
def records(quick):
    subjects = read_results([quick[0]])["subjects"]
    return {name: entry["records"] for name, entry in subjects.items()}


def test_a_quick_run_writes_strict_json_beside_its_environment(quick):
    file, _ = quick
    results = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert results["quick"] is True
    assert results["environment"]["torch"] == torch.__version__
    assert list(results["subjects"]) == list(SUBJECTS)


def test_every_figure_is_a_ratio_with_its_spread(records):
    def spreads(value):
        if isinstance(value, dict):
            if "ratio" in value:
                yield value
            for part in value.values():
                yield from spreads(part)

    found = [spread for own in records.values() for record in own for spread in spreads(record)]
    assert len(found) > 200
    for spread in found:
        assert 0 < spread["low"] <= spread["ratio"] <= spread["high"] < 1e5
        assert spread["seconds"] > 0
        assert spread["rounds"] >= 2


def test_solvers_has_every_solver_and_rule_and_spectrum(records):
    own = records["solvers"]
    names = {r["contestant"] for r in own}
    assert {f"eigh + {rule}" for rule in linalg.GRADIENTS} | (set(linalg.SOLVERS) - {"eigh"}) <= names
    assert {"autograd, eigh", "autograd, svd"} <= names
    assert {r["spectrum"] for r in own} == set(SPECTRA)
    for r in own:
        assert "failed" not in r
        assert 0.5 < r["saved"] < 20
        assert r["value_error"] is not None
        assert r["total"]["seconds"] > r["forward"]["seconds"]
    for r in own:
        if r["contestant"] in (solvers.DEFAULT, "svd"):
            assert r["gradient_error"] < 1e-6
    at_ties = [r for r in own if r["contestant"] == "eigh + naive" and r["spectrum"] == "ties"]
    assert all(r["gradient_error"] is None or r["gradient_error"] > solvers.ACCURATE for r in at_ties)


def test_the_full_table_has_the_sizes_batches_and_spectra_that_time_allows():
    cells = list(solvers.cells(quick=False))
    assert {c.size for c in cells} == {16, 32, 64, 128, 256, 512}
    assert {c.batch for c in cells} == {1, 64, 256}
    assert {c.spectrum for c in cells if (c.size, c.batch) == (512, 1)} == set(SPECTRA)
    assert max(c.batch * c.size**3 for c in cells) == 64 * 256**3
    assert len(list(polar.cells(quick=False))) == 22
    assert (128, 64, 32, 32) in {c.shape for c in layers.cells(quick=False)}


def test_rotations_are_right_and_small(records):
    own = {(r["size"], r["contestant"]): r for r in records["geometry"]}
    assert {name for _, name in own} == {"nearest_rotation", "autograd through svd", "roma"}
    for (size, name), r in own.items():
        assert r["gradient_error"] < 1e-4, (size, name)
    # The matrices are float32, so 40 times as much is 20 matrices of float64; roma's largest has d^4 entries.
    assert own[6, "nearest_rotation"]["peak"] < 40 < own[6, "roma"]["peak"]


def test_functions_are_as_accurate_as_promised_and_autograd_through_eigh_is_not(records):
    own = records["functions"]
    assert {r["function"] for r in own} == set(functions.FUNCTIONS)
    assert {name.partition("(")[0] for name in functions.FUNCTIONS} == set(linalg.FUNCTIONS)
    for r in own:
        if r["contestant"] == functions.OURS:
            assert (r["within"], r["not_finite"]) == (r["problems"], 0), r
    assert any(r["not_finite"] for r in own if r["contestant"] == "POT")
    json.dumps(own, allow_nan=False)


def test_the_truth_of_functions_is_the_one_of_the_tests():
    A, G = linalg.covariance(noise(5, 30, dtype=torch.float64)), noise(5, 5).double()
    A = (A + A.mT) / 2
    for computed, digits in (("50 digits", 1e-15), ("SciPy", 1e-12)):
        found = functions.TRUTHS[computed](A, (G + G.mT) / 2)
        for name in ("sqrt", "inv_sqrt", "log", "exp"):
            expected = truth.exact_function(A, G, truth.SCALARS[name])
            for one, other in zip(found[name], expected, strict=True):
                assert truth.relative_error(one, other) < digits, (computed, name)


def test_the_grid_has_the_gaps_conditions_and_sizes():
    cells = [c for c in functions.cells(quick=False) if c.truth == "50 digits"]
    assert {c.condition for c in cells} == {10.0**k for k in range(0, 13, 2)}
    assert min(c.gaps[1] for c in cells) == 1e-16
    assert {c.dtype for c in cells} == {"float32", "float64"}
    for cell in cells:
        for size in (2, 3, 12):
            A, _ = functions._problem(cell, size, 1e-3)
            l = torch.linalg.eigvalsh(A.double())
            if cell.condition > 1:
                assert l[-1] / l[0] == pytest.approx(cell.condition, rel=1e-2)
    large = [c for c in functions.cells(quick=False) if c.truth == "SciPy"]
    assert {(c.dtype, c.condition, max(c.sizes)) for c in large} == {
        (dtype, condition, 128) for dtype in functions.BOUNDS for condition in (1, 1e2, 1e4)
    }


def test_a_function_is_timed_over_the_root():
    timed = functions.times(quick=True)
    assert {r["contestant"].partition("(")[0] for r in timed} == {"matrix_logh", "matrix_exph", "matrix_powerh"}
    entry = {"records": [], "functions": [{**r, "size": 64, "over_root": {"ratio": 1.2}} for r in timed]}
    ((found, holds),) = [row[1:] for row in promises({"solvers": entry}).rows if "log and powers" in row[0]]
    assert found == "1.20"
    assert holds.startswith("no: ")  # and what bounds it


def test_polar_and_layers_are_sane(records):
    errors = {r["contestant"]: r["error"] for r in records["polar"]}
    muon = "Muon's five steps" if processor.has_half_products() else "Muon's five steps, float32"
    assert set(linalg.POLAR_SOLVERS) | {"torch.linalg.svd", muon} <= set(errors)
    assert errors["gram"] < 1e-6
    assert errors["svd"] < 1e-6
    assert 0.05 < errors[muon] < 0.6
    own = records["layers"]
    assert {r["subject"] for r in own} == {"norm", "products", "folded", "pool", "operator", "weight"}
    steps = {(r["contestant"], r["groups"]): r for r in own if r["subject"] == "products"}
    assert {groups for _, groups in steps} == {1, 2}
    for (name, groups), record in steps.items():
        assert record["fallbacks"] == 0
        assert 0 < record["products"] < record["launches"]
        if name != "eigh":  # which has a short way for one matrix
            assert record["products"] == steps[name, 3 - groups]["products"]  # a batch is one product
    counts = [
        steps[name, 1]["products"] for name in ("products", "products, float16 terms", "products, bfloat16 terms")
    ]
    assert steps["eigh", 1]["products"] < counts[0] < counts[1] < counts[2] < 6 * counts[0]
    assert {r["layout"] for r in own} == {"contiguous", "channels last"}
    assert all(r["is_orthogonal"] for r in own if r["contestant"] == "orthogonal_weight")
    kept = {r["contestant"]: r["saved"] for r in own if r["subject"] == "norm" and r["mode"] == "training"}
    assert kept["DecorrelatedBatchNorm2d"] < kept["whitening as usually written"]


def test_step_takes_network_layers_and_batch_from_a_preset(tmp_path, command_line):
    done = command_line("bench", "step", "--quick", "--preset", "gcp-digits", "--json", tmp_path / "step.json")
    assert done.returncode == 0, done.stderr
    own = [r for r in read_results([tmp_path / "step.json"])["subjects"]["step"]["records"] if r["subject"] == "step"]
    assert {(r["preset"], r["device"], r["batch_size"]) for r in own} == {("gcp-digits", "cpu", 4)}
    assert set(step.PAPER) <= {r["method"] for r in own}
    assert "svd+gauge" not in {r["method"] for r in own}  # it acts on whitening


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["step", "--device", "cuda"], "needs a GPU"),
        (["step", "--device", "abacus"], "abacus"),
        (["solvers", "--preset", "dbn-digits"], "orthocond bench step"),
        (["step", "--preset", "mine"], "mine"),
    ],
)
def test_presets_and_devices_that_are_not_there_are_told(command_line, arguments, said):
    done = command_line("bench", *arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_gpu_is_timed_by_its_events(monkeypatch):
    """Without a GPU: events that read a clock which only they move."""
    clock = iter(range(100))

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(clock)

        def elapsed_time(self, other):
            return 1000.0 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def contestant():
        yield
        next(clock)
        yield

    passes = alternate({"own": contestant}, Budget(0.0, fewest=2), "cuda")
    assert passes == {"own": [[1.0, 2.0], [1.0, 2.0]]}


def test_step_has_the_rows_of_table_6_with_the_papers_figures(records):
    own = {r["method"]: r for r in records["step"] if r["subject"] == "step"}
    assert set(step.PAPER) <= set(own)
    assert own["svd+nog+ow+olr"]["paper"]["svd"] == pytest.approx(155 / 139)
    assert own["svd"]["paper"]["bn"] == pytest.approx(139 / 132)
    assert own["svd"]["total"]["svd"]["ratio"] == own["bn"]["total"]["bn"]["ratio"] == 1
    assert {"nog", "ow", "monitor"} <= {r["part"] for r in records["step"] if r["subject"] == "added"}


def test_growth_is_fitted_for_every_contestant(quick):
    entry = read_results([quick[0]])["subjects"]["solvers"]
    assert {g["contestant"] for g in entry["growth"]} == {r["contestant"] for r in entry["records"]}
    made = [
        {"contestant": "x", "size": n, "batch": b, "spectrum": next(iter(SPECTRA)), "total": {"seconds": n**3 * b**0.5}}
        for n in (16, 32, 64)
        for b in (1, 4)
    ]
    (found,) = solvers.growth(made)
    assert found["in_size"] == pytest.approx({"1": 3, "4": 3})
    assert found["in_batch"] == pytest.approx({"16": 0.5, "32": 0.5, "64": 0.5})


def test_page_and_chart_are_made_from_the_files(quick, tmp_path):
    file, shown = quick
    write_page(tmp_path / "page.md", [file])
    page = (tmp_path / "page.md").read_text()
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert "(page.png)" in page
    assert "quick run" in page
    subjects = read_results([file])["subjects"]
    for name in SUBJECTS:
        for table in tables(name, subjects[name]):
            assert f"## {table.title}" in page
            assert table.title in shown
            assert all(len(row) == len(table.columns) for row in table.rows)


def test_promises_are_judged_by_the_records():
    def record(name, ratio, error):
        place = {"size": 64, "batch": 1, "spectrum": next(iter(SPECTRA)), "contestant": name}
        return {**place, "total": {"ratio": ratio}, "gradient_error": error}

    def judged(*records):
        return [
            [found, holds.partition(":")[0]]
            for _, found, holds in promises({"solvers": {"records": list(records)}}).rows
        ]

    ours = record(solvers.DEFAULT, 2.1, 1e-8)
    assert judged(ours, record("fast and wrong", 1.0, 0.5), record("never finite", 1.0, None)) == [
        ["in 1 of 1", "yes"],
        ["at 1 of 1 sizes", "yes"],
        ["2.10", "yes"],
    ]
    assert judged(record(solvers.DEFAULT, 2.6, 1e-8), record("better", 1.0, 1e-8)) == [
        ["in 0 of 1", "no"],
        ["at 0 of 1 sizes", "no"],
        ["2.60", "no"],
    ]


def test_promises_of_layers_and_polar_factors():
    def layer(shape, name, ratio, layout="contiguous"):
        place = {"shape": shape, "mode": "training", "layout": layout, "contestant": name}
        return {**place, "total": {"ratio": ratio}}

    pooled = [
        layer([32, 256, 7, 7], name, ratio)
        for name, ratio in (("CovariancePool2d", 4.0), ("the same, by the whole covariance", 140.0))
    ]
    norms = [
        layer([128, 64, 32, 32], "DecorrelatedBatchNorm2d", ratio, layout)
        for layout, ratio in (("contiguous", 1.4), ("channels last", 1.6))
    ]
    polars = [{"rows": 64, "columns": 27, "contestant": "gram", "total": {"ratio": 1.0}}]
    rows = promises({"layers": {"records": pooled + norms}, "polar": {"records": polars}}).rows
    assert [[found, holds.partition(":")[0]] for _, found, holds in rows] == [
        ["1.00", "yes"],
        ["1.40 contiguous, 1.60 channels last", "no"],  # both are promised
        ["35.0", "yes"],
    ]


def test_the_oracle_is_the_one_of_the_tests():
    """One by NumPy's eigenvalues, the other by the Lyapunov equation."""
    X = noise(3, 12, 30)
    A, G = linalg.covariance(X), noise(3, 12, 12)
    value, gradient = oracle(A, G)
    assert truth.relative_error(value, truth.root(A, -0.5, eps=EPS)) < 1e-10
    assert truth.relative_error(gradient, truth.root_gradient(A, G, -0.5, eps=EPS)) < 1e-8
    assert truth.relative_error(polar_factor(X[0]), truth.polar(X[0])) < 1e-10


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_problems_have_their_spectrum(spectrum):
    asked = problem(32, 2, spectrum)
    found, wanted = torch.linalg.eigvalsh(asked.A.double()), SPECTRA[spectrum](32).sort().values.expand(2, 32)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-14 if spectrum == "ties" else 1e-6)
    assert torch.equal(problem(32, 2, spectrum).G, asked.G)


def test_every_round_has_everyone_in_an_order_of_its_own_and_the_first_does_not_count():
    called = []

    def contestant(name):
        def passed():
            called.append(name)
            yield

        return passed

    passes = alternate({name: contestant(name) for name in "abc"}, Budget(seconds=0, fewest=30))
    rounds = ["".join(called[start : start + 3]) for start in range(0, len(called), 3)]
    assert all(sorted(order) == list("abc") for order in rounds)
    assert len(set(rounds)) == 6
    assert all(len(own) == len(rounds) - 1 == 30 for own in passes.values())


def test_a_contestant_that_fails_is_a_record_and_the_others_go_on(monkeypatch):
    def failing(A):
        raise torch.linalg.LinAlgError("did not converge\nat all")

    def silent(A):
        raise AssertionError

    everyone = solvers.contestants() | {"failing": failing, "silent": silent}
    monkeypatch.setattr(solvers, "contestants", lambda: everyone)
    found = {r["contestant"]: r for r in solvers.measure(solvers.Cell(16, 1, "condition 1e2"), quick=True)}
    assert found["failing"]["failed"] == "did not converge"
    assert found["silent"]["failed"] == "AssertionError"
    assert "total" not in found["failing"]
    assert "total" in found[solvers.DEFAULT]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder that packages are found in, forgotten again after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in peers.PACKAGES:
            del sys.modules[name]


def test_peers_compete_where_they_are_installed(site):
    (site / "torchspd.py").write_text("import torch\ndef invsqrtm(A):\n    return torch.linalg.inv(A)\n")
    (site / "spd_learn").mkdir()
    (site / "spd_learn" / "__init__.py").write_text("")
    (site / "spd_learn" / "functional.py").write_text(
        "class matrix_inv_sqrt:\n    @staticmethod\n    def apply(A):\n        return A\n"
    )
    (site / "geotorch.py").write_text("def orthogonal(layer, name):\n    layer.made = name\n")
    found = solvers.contestants()
    for name in ("torchspd", "torchspd in float64"):
        assert torch.allclose(found[name](torch.eye(2)), torch.eye(2) / (1 + EPS))
    assert torch.allclose(found["spd_learn"](torch.eye(2)), torch.eye(2) * (1 + EPS))
    layer = peers.orthogonal_parametrizations()["geotorch"](torch.nn.Linear(2, 2))
    assert layer.made == "weight"


def test_a_peer_that_cant_be_imported_is_left_out_and_told(site, monkeypatch):
    monkeypatch.setitem(peers.PACKAGES, "nobody", "nobody_has_this")
    (site / "torchspd.py").write_text("import something_that_is_not_there\n")
    (site / "spd_learn").mkdir()  # its functions can be imported, and stay in sys.modules when the whole fails
    (site / "spd_learn" / "__init__.py").write_text("from . import functional\nimport neither_is_this\n")
    (site / "spd_learn" / "functional.py").touch()
    (site / "geotorch.py").write_text("raise RuntimeError('not with this torch')\n")
    assert "torchspd" not in solvers.contestants()
    assert "geotorch" not in peers.orthogonal_parametrizations()
    state = peers.state()
    assert list(state) == list(peers.PACKAGES)
    assert state["torchspd"] == "can't be imported: No module named 'something_that_is_not_there'"
    assert state["spd_learn"] == "can't be imported: No module named 'neither_is_this'"
    assert state["nobody"] == "not installed"
    assert state["geotorch"] == "can't be imported: not with this torch"


def test_results_that_cant_be_written_or_read(tmp_path):
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(BenchError, match="choose another file with --json"):
        write_results({}, tmp_path / "folder.json")
    with pytest.raises(BenchError, match="can't read results from"):
        read_results([tmp_path / "none.json"])
    (tmp_path / "other.json").write_text("[1, 2]")
    with pytest.raises(BenchError, match="not written by orthocond bench"):
        read_results([tmp_path / "other.json"])


def test_a_file_that_cant_be_written_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from orthocond.lab.cli import app

    monkeypatch.setattr("orthocond.lab.bench.run.run", lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "folder.json").mkdir()
    done = CliRunner().invoke(app, ["bench", "--quick", "--json", str(tmp_path / "folder.json")])
    assert isinstance(done.exception, BenchError)
    assert not list(tmp_path.glob("*.partial"))


def test_the_page_without_results_is_one_sentence(tmp_path, monkeypatch):
    for arguments, told in (([], "usage"), (["page.md", str(tmp_path / "none.json")], "can't read results")):
        monkeypatch.setattr(sys, "argv", ["page", *arguments])
        with pytest.raises(SystemExit, match=told):
            page_main()


def test_what_is_saved_and_let_go_again_is_not_kept():
    x = torch.ones(8, requires_grad=True)

    def forward():
        (2 * x).exp()
        return x.exp()

    assert saved_bytes(forward) == 32


def test_an_error_that_is_not_finite_is_strict_json_too(monkeypatch):
    everyone = polar.contestants(polar.Cell(4, 6)) | {"broken": lambda A: A * torch.nan}
    monkeypatch.setattr(polar, "contestants", lambda cell: everyone)
    records = polar.measure(polar.Cell(4, 6), quick=True)
    assert {r["contestant"]: r["error"] for r in records}["broken"] is None
    json.dumps(records, allow_nan=False)
    (table,) = tables("polar", {"records": records})
    assert "not finite" in table.rows[0][-1]


def test_what_treatments_add_is_timed_on_a_gradient_that_is_one(monkeypatch):
    made = []
    convolution = torch.nn.Conv2d
    monkeypatch.setattr(step.nn, "Conv2d", lambda *a, **o: made.append(convolution(*a, **o)) or made[-1])
    for _ in step._stem("none")():
        pass
    (conv,) = made
    assert conv.weight.grad.norm() > 1e-3 * conv.weight.norm()


def test_where_the_default_fails_the_table_says_so():
    place = {"size": 64, "batch": 1, "spectrum": next(iter(SPECTRA))}
    spread = {"ratio": 1.0, "low": 1.0, "high": 1.0, "seconds": 1.0}
    other = {**place, "contestant": "other", "forward": spread, "total": spread, "gradient_error": 1e-8}
    records = [{**place, "contestant": solvers.DEFAULT, "failed": "no"}, other]
    _, fastest, whatever, _ = tables("solvers", {"records": records, "growth": []})
    assert whatever.columns == ["matrices", "other"]
    assert fastest.rows[0][1] == "other (failed)"
    _, fastest, *_ = tables("solvers", {"records": records[:1], "growth": []})
    assert fastest.rows[0] == ["1x64x64", "none"]


def test_what_newer_versions_of_torch_offer_competes_where_it_is_there(monkeypatch):
    names = ("torch.linalg.matrix_sqrth, inverted", "torch.linalg.polar")
    for name in ("matrix_sqrth", "polar"):
        monkeypatch.delattr(torch.linalg, name, raising=False)
    assert not set(names) & (set(solvers.contestants()) | set(polar.contestants(polar.Cell(4, 6))))

    def tall_polar(A):
        assert A.shape[-2] >= A.shape[-1]
        U, values, Vh = torch.linalg.svd(A, full_matrices=False)
        return U @ Vh, (Vh.mT * values) @ Vh

    monkeypatch.setattr(torch.linalg, "matrix_sqrth", linalg.matrix_sqrth, raising=False)
    monkeypatch.setattr(torch.linalg, "polar", tall_polar, raising=False)
    asked = problem(16, 2, "condition 1e2")
    assert asked.value_error(solvers.contestants()[names[0]](asked.A)) < 1e-4
    for shape in ((4, 6), (6, 4)):
        A = noise(*shape)
        factor = polar.contestants(polar.Cell(*shape))[names[1]](A)
        assert torch.allclose(factor.double(), polar_factor(A), atol=1e-5)
