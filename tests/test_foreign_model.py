"""A model that nobody here wrote: a ResNet of Hugging Face transformers, converted, treated and trained."""

import pytest
import torch

from orthocond import ConditionMonitor, find_pre_svd, treat
from orthocond.nn import DecorrelatedBatchNorm2d, convert_batchnorm, fold

from cases import noise

transformers = pytest.importorskip("transformers", reason="transformers is a test dependency alone")


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=4
    )
    return transformers.ResNetForImageClassification(config)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_its_first_norm_is_converted_and_its_stem_treated(model):
    first = next(name for name, layer in model.named_modules() if isinstance(layer, torch.nn.BatchNorm2d))
    convert_batchnorm(model, [first])
    x, y = noise(8, 3, 32, 32), torch.arange(8) % 4
    stem = first.replace("normalization", "convolution")
    assert find_pre_svd(model, x) == {first: stem}
    treatment = treat(model, "auto", "nog+ow+olr", example_input=x)
    assert treatment.name == stem
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    treatment.attach(optimizer)
    model.train()
    with ConditionMonitor(model) as monitor:
        losses = []
        for _ in range(6):
            loss = model(pixel_values=x, labels=y).loss + treatment.penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert len(monitor.history()) == 6
    model.eval()
    folded = fold(model)
    assert not any(isinstance(layer, DecorrelatedBatchNorm2d) for layer in folded.modules())
    assert torch.allclose(folded(pixel_values=x).logits, model(pixel_values=x).logits, atol=1e-3)


def test_a_folded_model_comes_back_from_a_checkpoint(model, tmp_path):
    convert_batchnorm(model)
    for seed in range(3):
        model.train()(pixel_values=noise(8, 3, 32, 32, seed=seed))
    folded = fold(model, keep_keys=True)
    x = noise(4, 3, 32, 32, seed=99)
    expected = model.eval()(pixel_values=x).logits
    assert torch.allclose(folded(pixel_values=x).logits, expected, atol=1e-3)
    folded.save_pretrained(tmp_path)
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert torch.allclose(loaded.eval()(pixel_values=x).logits, folded(pixel_values=x).logits, atol=1e-5)
