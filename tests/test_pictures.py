"""The pictures of the explanation show what the pages say they show."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "docs" / "explanation" / "pictures.py"


@pytest.fixture(scope="module")
def pictures():
    spec = importlib.util.spec_from_file_location("pictures", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def path(tmp_path):
    yield tmp_path / "picture.png"
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_each_picture_has_a_file_that_a_page_shows_and_that_is_small(pictures):
    text = "".join(page.read_text(encoding="utf-8") for page in SCRIPT.parent.glob("*.md"))
    names = {f"{picture.__name__}.png" for picture in pictures.PICTURES}
    assert names == {file.name for file in SCRIPT.parent.glob("*.png")}
    for name in names:
        assert f"]({name})" in text
        assert (SCRIPT.parent / name).stat().st_size < 150_000


def test_a_picture_is_the_same_each_time(pictures, tmp_path):
    torch.manual_seed(1)
    pictures.operator(tmp_path / "first.png", size=4)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    pictures.operator(tmp_path / "second.png", size=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()


def test_whitening_makes_a_circle_and_colouring_the_other_ellipse(pictures, path):
    facts = pictures.cloud(path, num=50)
    torch.testing.assert_close(facts["whitened"], torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(facts["coloured"], facts["style"])


def test_the_raw_condition_number_shows_the_precision_and_that_on_the_support_does_not(pictures, path):
    facts = pictures.condition(path, num_batches=4, num_images=8)
    assert (facts["rank"] == 27).all()
    assert (facts["raw, float32"] > 1e8).all()
    assert facts["raw, float64"].min() > 1e3 * facts["raw, float32"].max()
    assert facts["on the support"].max() < 2 * facts["on the support"].min() < 2e4
    assert (facts["eps = 0.01"] < facts["on the support"]).all()


def test_the_exact_gradient_is_accurate_at_every_gap_and_the_others_are_not(pictures, path):
    facts = pictures.gradients(path, num_gaps=9, num_matrices=8)
    assert (facts["exact, float32"] < 1e-6).all()
    assert (facts["exact, float64"] < 1e-14).all()
    for name in ("autograd through eigh", "naive", "pade"):
        assert not facts[f"{name}, float64"][0] < 0.01
        assert facts[f"{name}, float64"][-1] < 1e-14
    assert facts["autograd through eigh, float32"][0].isinf()
    gaps = facts["gaps, float64"]
    # At a tie the bounded rules lose the whole of the off-diagonal entry, and the degree of taylor tells from where on.
    for name, fine_from in (("taylor", 1.0), ("clip", 1e-3)):
        assert (facts[f"{name}, float64"][gaps < 1e-6] > 0.5).all()
        assert (facts[f"{name}, float64"][gaps > fine_from] < 1e-9).all()
    assert 0.2 * 0.5**10 < facts["taylor, float64"][-1] < 0.6**10  # gaps of 0.4 to 0.5


def test_what_the_moved_weight_puts_into_the_null_space_falls_with_eps_and_is_gone_with_rtol(pictures, path):
    facts = pictures.null_space(path, num_images=16)
    eps, moved = facts["eps"], facts["weight turned by 1%: null"]
    middle = (eps > 1e-7) & (eps < 1e-1)
    slopes = moved[middle].log().diff() / eps[middle].log().diff()
    torch.testing.assert_close(slopes, -torch.ones_like(slopes), rtol=0.1, atol=0.0)
    assert moved[eps <= 1e-5].min() > 1
    for name in ("next batch, float32", "next batch, bfloat16", "weight turned by 1%"):
        assert facts[f"{name}: null, rtol"] < 1e-6
        assert facts[f"{name}: support, rtol"] > 0.8
    assert facts["next batch, float32: support"][eps >= 1e-2].max() < 0.9 * facts["next batch, float32: support, rtol"]


def test_the_nearest_orthogonal_gradient_has_equal_singular_values_and_descends(pictures, path):
    facts = pictures.nog(path, num_images=16)
    assert facts["gradient"][0] > 10 * facts["gradient"][-1]
    torch.testing.assert_close(facts["nearest"], torch.ones_like(facts["nearest"]), rtol=0, atol=1e-6)
    torch.testing.assert_close(facts["decrease"], facts["gradient"].sum(), rtol=1e-5, atol=0)
    assert facts["inner"].abs() < 1e-3 * facts["gradient"].norm()  # whitening doesn't see the weight's scale


def test_the_exact_rate_is_the_least_and_the_papers_shrinks_a_small_weight(pictures, path):
    facts = pictures.olr(path, num_rates=41)
    rates = facts["rates"]
    for name in ("large", "small"):
        paper, exact = facts[f"{name}: rates"]
        least = rates[facts[f"{name}: values"].argmin()]
        assert abs(exact - least) <= rates[1]
        assert paper > 0
    assert facts["small: rates"][1] == 0


def test_spectral_norm_keeps_the_condition_number_and_orthogonality_lowers_it(pictures, path):
    facts = pictures.weights(path, num_images=8)
    torch.testing.assert_close(facts["spectral norm: cond"], facts["plain: cond"])
    assert facts["orthogonal weight: cond"] < facts["orthogonal loss: cond"] < facts["plain: cond"]
    assert facts["orthogonal weight: cond"] <= facts["patches: cond"]
    squares = facts["plain: kernel"].square()
    assert facts["plain: cond"] <= facts["patches: cond"] * squares[0] / squares[-1]


def test_an_orthogonal_kernel_is_no_orthogonal_map_of_images(pictures, path):
    facts = pictures.operator(path, size=4)
    torch.testing.assert_close(facts["operator"], torch.ones_like(facts["operator"]), rtol=0, atol=1e-5)
    assert facts["kernel"].max() > 1.2
    assert facts["kernel"].min() < 0.5
    assert facts["kernel"].max() <= 3


def test_proposition_1_holds_with_its_premise_and_not_without(pictures, path):
    facts = pictures.proposition(path, num_pairs=100)
    for n in (8, 64):
        t, rates = facts[f"products, {n}"], facts[f"rates, {n}"]
        torch.testing.assert_close(rates, n * t / (n**2 + 2 * t**2))
        assert (rates.abs() <= 1 / (2 * math.sqrt(2))).all()
        premise = t >= 1
        assert 0.05 < premise.double().mean() < 0.3
        assert (rates[premise] >= n / (n**2 + 2)).all()
        assert (rates[premise] <= n**2 / (n**2 + 2)).all()
        assert (rates[~premise] < 1 / (n**2 + 2)).double().mean() > 0.4
        assert 0.3 < (rates < 0).double().mean() < 0.7


@pytest.mark.half_products
def test_muon_is_near_the_polar_factor_and_ours_is_there(pictures, path):
    facts = pictures.muon(path, n=32)
    large = facts["sizes"] > 4e-3
    assert facts["values: Muon"][large].min() > 0.6
    assert facts["values: Muon"][large].max() < 1.25
    assert facts["values: Muon"][-1] < 0.1
    assert (facts["error: Muon"][1:] > 0.1).all()
    assert (facts["error: gram"] < 1e-9 * facts["conditions"] + 1e-6).all()
    well = facts["conditions"] < 500
    assert (facts["error: newton_schulz"][well] < 1e-5).all()
