"""A treatment without effect says so: not attached, a penalty that nobody adds, forwards that it can't see.

So does an optimizer without the weight that a treatment has put in place of another.
"""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

from orthocond import treat
from orthocond.errors import OrthocondWarning
from orthocond.nn import DecorrelatedBatchNorm1d

from cases import noise


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), DecorrelatedBatchNorm1d(4), nn.Linear(4, 1))


def train(model, steps=3, treatment=None, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(steps):
        optimizer.zero_grad()
        loss = model(noise(32, 6, seed=seed)).square().mean()
        (loss if treatment is None else loss + treatment.penalty()).backward()
        optimizer.step()


@pytest.mark.parametrize("spec", ["nog", "gauge", "nog+ow+olr"])
def test_a_treatment_that_is_never_attached_warns_once(spec):
    model = network()
    treatment = treat(model, "0", spec)
    with pytest.warns(OrthocondWarning, match=r"of '0' has no effect.*treatment\.attach\(optimizer\)") as caught:
        train(model, 5)
    assert len(caught) == 1
    assert not treatment.parameter._post_accumulate_grad_hooks


def test_one_that_nobody_kept_warns_too():
    model = network()
    treat(model, "0", "nog")
    gc.collect()
    with pytest.warns(OrthocondWarning, match="the treatment nog of '0' has no effect"):
        train(model)


@pytest.mark.parametrize("spec", ["ol", "ol+nog"])
def test_a_penalty_that_is_never_used_warns_once(spec):
    model = network()
    treatment = treat(model, "0", spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment.attach(optimizer)
    with pytest.warns(OrthocondWarning, match=r"add treatment\.penalty\(\) to the loss") as caught:
        train(model, 5, optimizer=optimizer)
    assert len(caught) == 1


@pytest.mark.parametrize("spec", ["none", "ow", "sn", "ol", "nog", "ol+nog+ow+olr", "gauge"])
def test_no_false_alarm(spec):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = network()
        treatment = treat(model, "0", spec)
        model(noise(32, 6)).square().mean().backward()  # a look at the gradient before
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if spec not in ("none", "ow", "sn", "ol"):  # what the weight or the loss does needs no optimizer
            treatment.attach(optimizer)
        train(model, 3, treatment, optimizer)
        treatment.detach()  # on purpose
        train(model, 3, treatment, optimizer)
        frozen = network().requires_grad_(False)
        treat(frozen, "0", spec)
        copied = copy.deepcopy(model)
        train(copied, 3, optimizer=torch.optim.SGD(copied.parameters(), lr=0.1))


@pytest.mark.parametrize("is_removed", [False, True])
@pytest.mark.parametrize("spec", ["ow", "sn"])
def test_an_optimizer_made_before_a_weight_was_replaced_is_told_of_once(spec, is_removed):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment = treat(model, "0", spec)
    if is_removed:
        treatment.remove()
    with pytest.warns(OrthocondWarning, match=r"'0' is not trained: .*make the optimizer after treat\(\)") as caught:
        train(model, 5, optimizer=optimizer)
    assert len(caught) == 1


def test_a_weight_that_was_replaced_is_not_kept():
    model = network()
    weight = weakref.ref(model[0].weight)
    treat(model, "0", "sn")
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize(
    "case", ["made after", "two optimizers", "frozen since", "put back", "a copy", "another model"]
)
def test_no_false_alarm_of_a_replaced_weight(case):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = network()
        optimizer, copied, weight = torch.optim.SGD(model.parameters(), lr=0.1), copy.deepcopy(model), model[0].weight
        treatments = [treat(model, layer, "sn") for layer in "02"]
        if case == "made after":
            train(model)  # several layers find the optimizer in one step
        elif case == "two optimizers":
            late = torch.optim.SGD([treatment.parameter for treatment in treatments], lr=0.1)
            for _ in range(3):
                train(model, 1, optimizer=optimizer)
                late.step()
        elif case == "frozen since":
            for treatment in treatments:
                treatment.parameter.requires_grad_(False)
            train(model, optimizer=optimizer)
        elif case == "put back":
            for treatment in treatments:
                treatment.remove()
            model[0].weight, model[2].weight = weight, optimizer.param_groups[0]["params"][-2]
            train(model, optimizer=optimizer)
        else:
            train(copied if case == "a copy" else network())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch.compile's own
def test_a_second_compiled_model_of_a_class_is_seen():
    torch.compiler.reset()
    first, second = network(), network()
    torch.compile(first, backend="eager")(noise(32, 6))
    compiled = torch.compile(second, backend="eager")
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    treatment = treat(compiled, "0", "gauge").attach(optimizer)
    train(compiled, 2, optimizer=optimizer)
    assert treatment.last.cond_before > 1
    treatment.detach()
    assert "forward" not in vars(second[0])


def test_a_forward_that_was_not_seen_is_told_once():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(noise(32, 6)).square().mean().backward()
    treatment = treat(model, "0", "gauge").attach(optimizer)
    with pytest.warns(OrthocondWarning, match="gauge did not see the forward pass of '0'") as caught:
        optimizer.step()
    assert len(caught) == 1
    assert treatment.last.cond_before is None
    train(model, 2, optimizer=optimizer)
    assert treatment.last.cond_before > 1
