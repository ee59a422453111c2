"""Settings, methods and presets: where values come from, and what is said of wrong ones."""

import dataclasses
import json
from pathlib import Path

import pytest

from orthocond.errors import ArgumentError
from orthocond.lab.config import Config, changed, check_effect, flags, from_json, from_settings, from_toml
from orthocond.lab.data import load_data
from orthocond.lab.methods import ALL, PAPER, method, method_list
from orthocond.lab.network import network
from orthocond.lab.presets import PRESETS, preset
from orthocond.treatments import parse


def test_the_paper_s_presets_are_those_of_its_appendix_b():
    """Every number here is in appendix B; what is not there is marked so in the preset."""
    for name, classes in (("dbn-cifar10", 10), ("dbn-cifar100", 100)):
        config = preset(name)
        assert (config.dataset, config.num_classes) == (f"uoft-cs/{name.removeprefix('dbn-')}", classes)
        assert (config.model, config.meta, config.small_images, config.width) == ("resnet50", "dbn", True, 64)
        assert (config.epochs, config.learning_rate, config.momentum, config.weight_decay) == (350, 0.1, 0.9, 5e-4)
        assert (config.schedule, config.milestones, config.gamma) == ("steps", (100, 200, 300), 0.1)
        assert (config.batch_size, config.eps, config.rtol, config.gradient) == (128, 0.01, 0.0, "pade(clamp=true)")
        assert (config.pad, config.flip, config.parts) == (4, True, "ow(kind=operator)")
    config = preset("gcp-imagenet")
    assert (config.dataset, config.num_classes) == ("ILSVRC/imagenet-1k", 1000)
    assert (config.model, config.meta, config.small_images, config.reduction) == ("resnet18", "gcp", False, 256)
    assert (config.epochs, config.learning_rate, config.momentum, config.weight_decay) == (60, 0.1, 0.9, 1e-4)
    assert (config.schedule, config.milestones, config.gamma) == ("steps", (30, 45), 0.1)
    assert (config.batch_size, config.resize, config.crop, config.flip) == (256, 256, 224, True)
    assert (config.gradient, config.solver, config.last_stride) == ("pade(clamp=true)", "svd", 2)


def test_the_design_s_presets_are_there():
    assert set(PRESETS) == {
        *("dbn-cifar10", "dbn-cifar100", "gcp-imagenet"),
        *("dbn-digits", "gcp-digits", "dbn-cifar10-small", "gcp-cifar10-small"),
    }


@pytest.mark.parametrize("name", PRESETS)
def test_a_configuration_survives_its_file(name):
    config = preset(name)
    assert from_json(config.to_json()) == config


def test_a_toml_file_and_flags_give_the_same(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text(
        'learning_rate = 1\nmilestones = [3, 5]\nrtol = 1e-3\nflip = false\nmethod = "svd+ow+nog"\nsteps = 7\n'
    )
    flags = {
        "learning_rate": "1",
        "milestones": "3,5",
        "rtol": "0.001",
        "flip": "false",
        "method": "svd+nog+ow",
        "steps": "7",
    }
    config = changed(preset("dbn-digits"), from_toml(file))
    assert config == changed(preset("dbn-digits"), flags)
    assert (config.learning_rate, config.milestones, config.method) == (1.0, (3, 5), "svd+nog+ow")
    assert changed(config, {"rtol": "none", "milestones": ""}).rtol is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rat": 1}, "unknown setting 'learning_rat'.*Did you mean 'learning_rate'"),
        ({"learning_rate": "fast"}, "learning_rate takes a number, got 'fast'"),
        ({"epochs": 1.5}, "epochs takes a whole number, got 1.5"),
        ({"epochs": True}, "epochs takes a whole number"),
        ({"flip": "maybe"}, "flip takes true or false"),
        ({"milestones": "a,b"}, "milestones takes e.g. 30,45"),
        ({"milestones": (5, 3)}, "ascending order"),
        ({"model": 7.5}, "model takes text"),
        ({"model": "resnet5"}, "Did you mean 'resnet50'"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be at least"),
        ({"devices": "two"}, "devices must be a number or auto"),
        ({"method": "svd+nogg"}, "Did you mean 'nog'"),
        ({"method": "svt"}, "choose one of svd"),
        ({"method": "bn+nog"}, "use bn alone, or svd\\+nog"),
        ({"gradient": "exct"}, "Did you mean 'exact'"),
        ({"pre_svd_rate": -0.1}, "pre_svd_rate must be at least"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(settings, message):
    with pytest.raises(ArgumentError, match=message):
        changed(preset("dbn-digits"), settings)


def test_a_request_without_effect_on_any_run_is_refused():
    given = {"monitor_exact": 5, "pre_svd_rate": 0.1}
    config = changed(preset("dbn-digits"), given)
    check_effect(given, config, ["bn", "products"])
    for methods in (["svd", "bn"], ["bn"]):
        with pytest.raises(ArgumentError, match="leave it out"):
            check_effect(given, config, methods)
    check_effect({}, config, ["svd"])  # stored with a run, not asked for
    with pytest.raises(ArgumentError, match="bn has none; leave it out"):
        check_effect({"pre_svd_rate": 0.1}, config, ["bn"])


def test_parts_are_options_and_no_treatments():
    with pytest.raises(ArgumentError, match=r"no method names nog or ow; .*, e\.g\. svd\+nog\+ow"):
        check_effect({"parts": "NOG + ow"}, Config("mine", parts="nog+ow"), ["svd", "bn"])


@pytest.mark.parametrize(
    ("parts", "methods"),
    [
        ("none", ["svd"]),
        ("", ["bn"]),
        ("ow(kind=operator, tolerance=1e-3)", ["svd", "bn"]),  # of a file for several commands
        ("ow(kind=kernel)", ["svd"]),  # instead of a preset's operator
        ("nog+ow", ["svd", "svd+nog", "svd+ow(kind=operator)"]),
    ],
)
def test_parts_that_may_have_an_effect_are_taken(parts, methods):
    given = {"parts": parts}
    check_effect(given, changed(preset("dbn-cifar10"), given), methods)


def test_files_that_are_no_configuration(tmp_path):
    with pytest.raises(ArgumentError, match="can't read the configuration"):
        from_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(ArgumentError, match="is not valid TOML"):
        from_toml(tmp_path / "bad.toml")
    for text in ("", "[]", "{}", '{"preset": "x"', "null"):
        with pytest.raises(ArgumentError, match="is damaged"):
            from_json(text)
    with pytest.raises(ArgumentError, match="unknown setting 'new_setting'"):  # of another version
        from_json('{"preset": "x", "new_setting": 1}')


def test_methods_have_one_name_each():
    assert method("SVD + olr+NOG").name == "svd+nog+olr"
    assert method("newton_schulz+nog").solver == "newton_schulz"
    assert method_list("paper") == list(PAPER)
    assert method_list("all, svd+nog, svd+ow+nog") == list(ALL)
    assert len(set(ALL)) == len(ALL)
    assert preset("dbn-digits").can_be_gauged
    assert not preset("dbn-cifar10").can_be_gauged  # it has eps
    assert not preset("gcp-digits").can_be_gauged
    assert [name for name in ALL if name not in method_list("all", with_gauge=False)] == ["svd+gauge", "svd+nog+gauge"]
    with pytest.raises(ArgumentError, match="no methods"):
        method_list(" , ")


def test_every_setting_is_explained():
    for field in dataclasses.fields(Config):
        assert field.name == "preset" or field.metadata["help"]


def test_methods_have_options_of_their_own():
    config = Config("mine", method="svd+ow(normalize=false)+nog(solver=newton_schulz(iterations=20))")
    assert config.method == "svd+nog(solver=newton_schulz(iterations=20))+ow(normalize=false)"
    assert method(config.method).treatment == config.method.removeprefix("svd+")
    nested = "svd+nog(max_norm=1.0, solver=newton_schulz(iterations=20))"
    assert len(method_list(f"svd+olr(rule=exact, steps=9),{nested},svd")) == 3
    with pytest.raises(ArgumentError, match="has no such treatment: ow got an unknown option 'sort'"):
        Config("mine", method="svd+ow(sort=x)")


def test_the_meta_layer_s_options_may_be_the_method_s():
    config = Config("mine", method="SVD( rtol=0, eps=1e-5 )+nog", eps=0.5, rtol=0.25, meta="gcp", model="convnet")
    assert config.method == "svd(eps=1e-5, rtol=0)+nog"
    assert from_json(config.to_json()) == config
    exact = method("svd(eps=0.012345678901)")
    assert method(exact.name).options == exact.options == {"eps": 0.012345678901}
    layers = {
        "svd": (0.5, 0.25),
        "svd(eps=1e-5)": (1e-5, 0.25),
        "svd(eps=1e-5, rtol=0)": (1e-5, 0.0),
        "newton_schulz(eps=2)": (2.0, None),
    }
    for name, options in layers.items():
        model, _ = network(changed(config, {"method": name}), load_data(preset("dbn-digits")), sync=False)
        assert (model.pool.eps, model.pool.rtol) == options
    assert method_list("svd(eps=1e-5, rtol=0),bn") == ["svd(eps=1e-5, rtol=0)", "bn"]
    for name, message in [
        ("svd(esp=1)", "no option 'esp': svd takes eps, rtol, clamp"),
        ("newton_schulz(rtol=0)", "newton_schulz takes eps"),
        ("bn(eps=1)", "bn has no options"),
        ("svd(eps=-1)", "at least 0 for eps, got '-1'"),
        ("svd(eps=much)", "at least 0 for eps, got 'much'"),
        ("svd(eps=1", "without a closing parenthesis"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            method(name)


def test_eps_as_a_floor_is_a_setting_and_a_method():
    config = Config("mine", method="svd(clamp=true, eps=1e-2)+nog", meta="gcp", model="convnet")
    assert config.method == "svd(eps=0.01, clamp=true)+nog"
    assert from_json(config.to_json()) == config
    assert method("svd(clamp=false)").name == "svd"
    for settings, solver in [
        ({}, "eigh(clamp=true)"),
        ({"solver": "svd"}, "svd(clamp=true)"),
        ({"solver": "eigh(wide=false)"}, "eigh(wide=false, clamp=true)"),
        ({"solver": "svd(clamp=true)", "method": "svd", "eps": 0.5}, "svd(clamp=true)"),
        ({"solver": "svd", "method": "svd"}, "svd"),
    ]:
        model, _ = network(changed(config, settings), load_data(preset("dbn-digits")), sync=False)
        assert model.pool.solver == solver
    with pytest.raises(ArgumentError, match="has no eps to raise eigenvalues to"):
        Config("mine", method="svd(clamp=true)")
    with pytest.raises(ArgumentError, match="true or false for clamp, got"):
        method("svd(clamp=0.1)")
    with pytest.raises(ArgumentError, match="newton_schulz takes eps"):
        method("newton_schulz(clamp=true)")


def test_a_presets_options_hold_where_the_method_gives_none():
    paper = preset("dbn-cifar10")
    for name, spelled, treatment in [
        ("svd+ow+nog", "svd+nog+ow", "nog+ow(kind=operator)"),
        ("svd+ow(normalize=false)", "svd+ow(normalize=false)", "ow(kind=operator, normalize=false)"),
        ("svd+ow(kind=kernel)", "svd+ow(kind=kernel)", "ow"),
    ]:
        config = changed(paper, {"method": name})
        assert config.method == spelled
        assert method(config.method, config.parts).treatment == treatment
        assert from_json(config.to_json()) == config
        assert flags(config, paper) == ["--method", spelled]


SAVED = Path(__file__).parents[1] / "saved"


@pytest.mark.parametrize("number", range(len(json.loads((SAVED / "configs-0.1.json").read_text()))))
def test_configurations_of_version_0_1_load(number):
    settings = json.loads((SAVED / "configs-0.1.json").read_text())[number]
    config = from_settings(settings)
    chosen = method(config.method, config.parts)
    names = ("kind", "normalize", "penalty_weight", "rule", "threshold", "metric")
    for part in parse(chosen.treatment):
        for name in names:
            if name in part.options:
                assert part.options[name] == settings[name]
    for name, value in settings.items():
        if name not in (*names, "milestones", "method"):
            assert getattr(config, name) == value
    assert from_json(config.to_json()) == config


def test_a_setting_that_became_an_option_says_how_it_is_written():
    with pytest.raises(ArgumentError, match=r"an option of ow now; write it .* svd\+ow\(kind=operator\)"):
        changed(Config("mine"), {"kind": "operator"})
