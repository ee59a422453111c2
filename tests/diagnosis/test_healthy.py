"""No alarm on models that are fine, and the same training with and without the observer."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

from orthocond import diagnose
from orthocond.nn import CovariancePool2d, DecorrelatedBatchNorm2d, RotationHead, WhiteningColoring2d, orthogonal_weight

from cases import noise


class Residual(nn.Module):
    """The basic block of torchvision's ResNets."""

    def __init__(self, width, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)

    def forward(self, x):
        return (x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()


def resnet(norm):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), norm(8), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


class PrincipalComponents(nn.Module):
    """Reconstruction from the three leading directions of a batch."""

    def forward(self, x):
        x = x.flatten(1)[:, :6] * torch.logspace(0, -1, 6)
        U = torch.linalg.eigh(x.mT @ x / len(x)).eigenvectors[:, -3:]
        return x @ U @ U.mT


class LogDeterminant(nn.Module):
    """A Gaussian process with noise on the diagonal."""

    def forward(self, x):
        x = x.flatten(1)[:, :2]
        K = torch.exp(-torch.cdist(x, x).square()) + 0.1 * torch.eye(len(x))
        return torch.linalg.cholesky(K)


class Gaussian(nn.Module):
    """Reparametrized samples."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.eye(4) + 0.1 * noise(4, 4))

    def forward(self, x):
        covariance = self.factor @ self.factor.mT
        return torch.distributions.MultivariateNormal(x.flatten(1)[:, :4], covariance).rsample()


class NuclearNorm(nn.Linear):
    """A penalty on the singular values of a weight."""

    def forward(self, x):
        return super().forward(x.flatten(1)) + 0.1 * torch.linalg.svdvals(self.weight).sum()


class LeastSquares(nn.Module):
    """A pseudo-inverse of tall matrices."""

    def forward(self, x):
        return torch.linalg.pinv(x[:, 0, :, :4])


class WhitenedFeatures(nn.Module):
    """ZCA by eigh, of more samples than channels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)

    def forward(self, x):
        x = self.conv(x).transpose(0, 1).flatten(1)
        l, U = torch.linalg.eigh(x @ x.mT / x.shape[1])
        return (U * l.rsqrt()) @ U.mT @ x


class Styled(nn.Module):
    """Whitening and colouring by the reversed batch."""

    def __init__(self):
        super().__init__()
        self.conv, self.wct = nn.Conv2d(3, 4, 3), WhiteningColoring2d()

    def forward(self, x):
        x = self.conv(x)
        return self.wct(x, x.flip(0))


MODELS = {
    "ResNet": lambda: resnet(nn.BatchNorm2d),
    "ResNet, whitened": lambda: resnet(DecorrelatedBatchNorm2d),
    "covariance pooling": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), CovariancePool2d()),
    "whitening and colouring": Styled,
    "orthogonal weight": lambda: orthogonal_weight(nn.Conv2d(3, 8, 3)),
    "rotations": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 9), RotationHead()),
    "spectral norm": lambda: spectral_norm(nn.Conv2d(3, 8, 3)),
    "torch's orthogonal": lambda: nn.Sequential(nn.Flatten(), orthogonal(nn.Linear(192, 16))),
    "transformer": lambda: nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(64, 4, 32, batch_first=True)),
    "principal components": PrincipalComponents,
    "log determinant": LogDeterminant,
    "Gaussian": Gaussian,
    "nuclear norm": lambda: NuclearNorm(192, 4),
    "least squares": LeastSquares,
    "whitening by eigh": WhitenedFeatures,
}


def train(model, x, watch):
    torch.manual_seed(0)
    parameters = [x, *model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    with watch:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def assert_healthy(build, x):
    results = []
    watches = diagnose(), diagnose()
    for watch in (None, *watches):
        torch.manual_seed(0)
        model = build()
        context = torch.enable_grad() if watch is None else watch
        results.append(train(model, x.clone().requires_grad_(), context))
    for diagnosis in watches:
        assert {found.verdict for found in diagnosis.findings} <= {"healthy"}, str(diagnosis)
        assert not diagnosis.notes
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    return diagnosis


@pytest.mark.parametrize("name", MODELS)
def test_no_alarm(name):
    diagnosis = assert_healthy(MODELS[name], noise(16, 3, 8, 8))
    assert bool(diagnosis.findings) == (
        name not in ("ResNet", "orthogonal weight", "spectral norm", "torch's orthogonal", "transformer")
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["Bert", "GPT2", "ResNet"])
def test_no_alarm_on_models_of_hugging_face(name):
    transformers = pytest.importorskip("transformers", reason="transformers is a test dependency alone")
    small = {
        "Bert": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "vocab_size": 40,
        },
        "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40, "bos_token_id": 0, "eos_token_id": 0},
        "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"},
    }[name]
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**small))
    images = noise(4, 3, 32, 32) if name == "ResNet" else torch.arange(24).reshape(2, 12)
    with diagnose(model) as diagnosis:
        model(images).last_hidden_state.square().mean().backward()
    assert str(diagnosis) == "No decomposition was seen."
