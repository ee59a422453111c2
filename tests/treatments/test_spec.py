"""Specifications: one grammar, options typed by each part, one canonical spelling, messages that say what to write."""

import itertools

import pytest
from torch import nn

from orthocond import treat
from orthocond.errors import ArgumentError
from orthocond.treatments import TREATMENTS, Gauge, Note, OrthogonalWeight, Part, canonical, parse


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("none", "none"),
        ("", "none"),
        ([], "none"),
        ("olr + OW+nog", "nog+ow+olr"),
        ("olr(rule=exact, steps=2000)+nog(solver=svd)+ow(kind=operator)",
         "nog(solver=svd)+ow(kind=operator)+olr(rule=exact, steps=2000)"),
        ("ow( normalize = False )", "ow(normalize=false)"),
        ("ow(normalize=true, kind=kernel)", "ow"),
        ("nog(solver=newton_schulz(iterations=20))", "nog(solver=newton_schulz(iterations=20))"),
        ("nog(max_norm=none)", "nog"),
        ("olr(steps=1e3)", "olr(steps=1000)"),
        ("gauge(threshold=5)", "gauge(threshold=5.0)"),
        (["ow", "nog+olr"], "nog+ow+olr"),
        ([OrthogonalWeight(kind="operator"), "nog"], "nog+ow(kind=operator)"),
        (Gauge(momentum="reset"), "gauge(momentum=reset)"),
        ("nog+nog", "nog"),
    ],
)  # fmt: skip
def test_canonical(spec, expected):
    assert canonical(spec) == expected
    assert canonical(expected) == expected


def test_every_order_is_one_spelling():
    assert {canonical("+".join(order)) for order in itertools.permutations(["nog", "sn", "ol", "ow", "olr"])} == {
        "nog+sn+ol+ow+olr"
    }


class Mine(Part):
    name = "mine"

    def __init__(self, *, text: str = "a", flag: bool = False, count: int = 1, size: float | None = None):
        pass


def test_options_of_a_users_part():
    assert Mine.options == {"text": "a", "flag": False, "count": 1, "size": None}
    assert repr(Mine(flag=True, size=2.0)) == "mine(flag=true, size=2.0)"
    assert canonical([Mine(), "olr", "nog"]) == "nog+olr+mine"
    for options, message in (
        ({"size": "large"}, "size takes a number or none"),
        ({"flag": 1}, "flag takes true or false"),
        ({"count": 1.5}, "count takes a whole number"),
        ({"count": True}, "count takes a whole number"),
        ({"more": 1}, "unknown option 'more'; its options are: text=a, flag=false, count=1, size=none"),
    ):
        with pytest.raises(ArgumentError, match=f"mine got .*{message}"):
            Mine(**options)


def test_options_by_place_are_refused():
    class ByPlace(Part):
        name = "by_place"

        def __init__(self, size=1.0, *others):
            self.size = size

    class Inherited(Mine):
        name = "inherited"

    assert ByPlace().size == 1.0
    assert repr(Inherited(count=2)) == "inherited(count=2)"
    for call in (lambda: ByPlace(2.0), lambda: ByPlace(size=2.0), lambda: Inherited("b"), lambda: Gauge(5.0)):
        with pytest.raises(ArgumentError, match=r"have to be keyword-only; write def __init__\(self, \*, \.\.\.\)"):
            call()


class SameName(Part):
    name = "nog"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nog(solver=svd", "without a closing parenthesis"),
        ("nog)", "with a closing parenthesis too many"),
        ("nog(svd)", "with 'svd' instead of an option and its value"),
        ("nog(solver=svd)x", "with something behind the closing parenthesis"),
        ("ow(normalize=maybe)", r"normalize takes true or false, e.g. ow\(normalize=true\)"),
        ("olr(steps=many)", "steps takes a whole number or none"),
        ("olr(steps=0)", "steps >= 1"),
        ("gauge(threshold=high)", "threshold takes a number"),
        ("gauge(process_group=0)", "unknown option 'process_group'"),
        ("nog+nog(solver=svd)", r"got nog twice, as nog and as nog\(solver=svd\)"),
        (["nog", SameName()], "got nog twice"),
        ([SameName(), "nog"], "got nog twice"),
        ([Gauge(), Gauge(process_group=0)], "got gauge twice"),
        ("qr", "unknown treatment 'qr'; choose one of nog, sn"),
        ("gauge+ow", "can't combine gauge with ow"),
        (["nog", 3], r"expected names and instances of Part, got 3; pass e\.g\."),
        ([OrthogonalWeight], "got the class OrthogonalWeight"),
        (None, "got None"),
    ],
)
def test_what_is_wrong_is_said(spec, message):
    with pytest.raises(ArgumentError, match=message):
        parse(spec)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("nog+ow", {"kind": "operator", "solver": "svd"}, r'"nog\(solver=svd\)\+ow\(kind=operator\)"'),
        ("ow", {"normalize": False}, r'write treat\(model, layer, "ow\(normalize=false\)"\)'),
        ("nog", {"scale": "bogus"}, r'"nog\+gauge\(scale=bogus\)"\) \(gauge is not in the specification\)'),
        ("nog", {"speed": 3}, "unknown option 'speed'; choose one of solver, max_norm"),
    ],
)
def test_flat_options_answer_with_the_new_spelling(spec, options, message):
    with pytest.raises(ArgumentError, match=message):
        treat(nn.Sequential(nn.Linear(2, 2)), "0", spec, **options)


def test_the_registry_describes_itself():
    assert list(TREATMENTS) == ["nog", "sn", "ol", "ow", "olr", "gauge"]
    with pytest.raises(TypeError):
        TREATMENTS["mine"] = Mine
    for name, part in TREATMENTS.items():
        assert part.name == name
        assert part.description.endswith(".")
        assert part.reference
        assert part.acts_on in ("weight", "gradient", "learning rate", "loss")
        assert set(part.excludes) <= set(TREATMENTS)
        assert all(isinstance(note, Note) and note.description for note in part.notes)
    names = [note.name for part in TREATMENTS.values() for note in part.notes]
    assert len(set(names)) == len(names)
