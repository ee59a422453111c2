"""Treating that fails leaves everything as it was: classes, tensors and their values, hooks, parts, and silence."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from orthocond import treat
from orthocond.errors import ArgumentError, OrthocondWarning
from orthocond.nn import DecorrelatedBatchNorm2d
from orthocond.treatments import Part

from cases import noise

EXAMPLE = noise(4, 3, 5, 5)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), DecorrelatedBatchNorm2d(8), nn.Conv2d(8, 4, 3), DecorrelatedBatchNorm2d(4)
    )  # fmt: skip


class Broken(Part):
    """It changes what it can before it raises."""

    name = "broken"
    order = 90

    def __init__(self, *, error=RuntimeError):
        self.error = error

    def install(self, target):
        target.after_forward(target.model, print)
        target.layer.register_buffer("mark", torch.ones(1), persistent=False)
        target.layer.register_forward_hook(print)
        with torch.no_grad():
            target.parameter.zero_()
            target.parameter.data = target.parameter.clone()
        raise self.error("broken")


def seen(model):
    """Return what can be compared of classes, attributes, hooks and tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    collections = [
        (type(module), {name: list(value) for name, value in vars(module).items() if isinstance(value, dict | set)})
        for module in model.modules()
    ]
    where = [(id(tensor), tensor.data_ptr(), tensor.requires_grad) for tensor in tensors]
    return (
        collections,
        [set(vars(module)) for module in model.modules()],
        where,
        [tensor.tolist() for tensor in tensors],
    )


@pytest.mark.parametrize(
    ("layer", "spec", "error"),
    [
        ("all", "nog+ol+ow(kind=operator)", ArgumentError),  # the second layer has no padding
        ("all", ["nog", "sn", Broken()], RuntimeError),
        ("0", ["ol", "ow", Broken(error=ArgumentError)], ArgumentError),
        ("0", ["nog", "ow(kind=operator)", Broken()], RuntimeError),
        ("0", ["ow", Broken(error=KeyboardInterrupt)], KeyboardInterrupt),
        ("0", "ow+olr", OrthocondWarning),  # warnings are errors here
    ],
)
def test_the_model_is_as_it_was(layer, spec, error):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = network()
        handle = model[0].register_forward_hook(lambda *_: None)
        optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), seen(model)
        with pytest.raises(error):
            treat(model, layer, spec, example_input=EXAMPLE)
        assert seen(model) == before
        handle.remove()
        assert not model[0]._forward_hooks
        for _ in range(3):  # nothing is missing, and nothing is said to be
            model(EXAMPLE).square().mean().backward()
            optimizer.step()
        treat(model, "all", "ow(kind=kernel)", example_input=EXAMPLE)


@pytest.mark.parametrize(("name", "spec"), [("weight", "sn"), ("bias", "ow")])
def test_a_parametrization_of_the_users_own_stays(name, spec):
    model = network()
    parametrize.register_parametrization(model[0], name, nn.Identity())
    before, output = seen(model), model[0](EXAMPLE)
    with pytest.raises(RuntimeError, match="broken"):
        treat(model, "0", [spec, Broken()])
    assert seen(model) == before
    assert torch.equal(model[0](EXAMPLE), output)


def test_a_part_whose_installation_failed_can_treat_another_layer():
    class Picky(Part):
        name = "picky"

        def install(self, target):
            self.layer = target.layer
            if target.name == "0":
                raise ArgumentError("another one.")

    part, model = Picky(), network()
    with pytest.raises(ArgumentError, match=r"another one\."):
        treat(model, "0", part)
    assert not hasattr(part, "layer")
    treat(model, "2", part)
    with pytest.raises(ArgumentError, match="treats a layer already"):
        treat(model, "0", part)
    with pytest.raises(ArgumentError, match="treats a layer already"):  # still
        treat(model, "0", part)
