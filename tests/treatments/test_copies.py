"""Copies of a model, its optimizer and its treatment: they train on as the originals do, once they are attached."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from orthocond import treat
from orthocond.errors import OrthocondWarning
from orthocond.nn import DecorrelatedBatchNorm1d

from cases import noise


def build(spec):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), DecorrelatedBatchNorm1d(4), nn.Linear(4, 1))
    treatment = treat(model, "0", spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, treatment.attach(optimizer)


def train(model, optimizer, *_, steps=3):
    for seed in range(steps):
        optimizer.zero_grad()
        model(noise(32, 6, seed=seed)).square().mean().backward()
        optimizer.step()


def pickled(parts):
    return pickle.loads(pickle.dumps(parts))


def saved(parts):
    file = io.BytesIO()
    torch.save(parts, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    ("spec", "copied"),
    [  # torch can't pickle what is parametrized
        *((spec, copied) for spec in ("nog", "nog+gauge") for copied in (copy.deepcopy, pickled, saved)),
        ("nog+ow+olr", copy.deepcopy),
    ],
)
def test_a_copy_trains_on_as_the_original_does(spec, copied):
    parts = build(spec)
    train(*parts)
    model, optimizer, treatment = others = copied(parts)
    assert treatment.layer is model[0]
    assert treatment.last == parts[2].last
    treatment.attach(optimizer)
    for each in (parts, others):
        train(*each)
    assert treatment.last == parts[2].last
    assert all(torch.equal(a, b) for a, b in zip(parts[0].parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("holder", [lambda model: model, lambda model: model[0]], ids=["model", "layer"])
def test_a_model_that_holds_its_treatment_is_copied_with_it(holder, copied):
    model, optimizer, holder(model).treatment = build("nog+gauge")
    train(model, optimizer)
    model = copied(model)
    treatment = holder(model).treatment
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treatment.detach()  # as Lightning's callback does before it attaches
    treatment.attach(optimizer)
    train(model, optimizer)
    assert treatment.layer is model[0]
    assert treatment.last.learning_rate == 0.1


def test_a_copy_that_is_trained_without_being_attached_says_so():
    parts = build("nog")
    model, optimizer, _ = copy.deepcopy(parts)
    with pytest.warns(OrthocondWarning, match="nog of '0' has no effect.*is not attached") as caught:
        train(model, optimizer, steps=5)
    assert len(caught) == 1
    parts[2].detach()  # on purpose
    model, optimizer, _ = copy.deepcopy(parts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer)
