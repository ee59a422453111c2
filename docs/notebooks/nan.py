# %% [markdown]
# A model whitens its features with `torch.linalg.eigh`. The forward pass is fine, the loss is fine, and then everything
# is NaN. This notebook shows where the NaN comes from, and which lines to change.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import orthocond
from orthocond.linalg import matrix_inv_sqrth


class Whitening(nn.Module):
    """As it is usually written."""

    def forward(self, x):
        x = x - x.mean(0)
        cov = x.mT @ x / len(x)
        l, U = torch.linalg.eigh(cov)
        return x @ (U * l.clamp(min=1e-5).rsqrt()) @ U.mT


class RankAwareWhitening(nn.Module):
    """The same, with one function in place of eigh, rsqrt and two products."""

    def forward(self, x):
        x = x - x.mean(0)
        return x @ matrix_inv_sqrth(x.mT @ x / len(x), rtol=1e-4)


images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def train(whitening, steps=60):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), whitening, nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        batch = torch.arange(step * 24, step * 24 + 24) % len(images)  # 24 samples for 32 channels
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


curves = {name: train(layer)[1] for name, layer in (("eigh", Whitening()), ("matrix_inv_sqrth", RankAwareWhitening()))}
figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
for name, losses in curves.items():
    finite = [loss for loss in losses if loss == loss]
    (line,) = ax.plot(losses, label=f"{name}: {len(finite)} finite losses of {len(losses)}", linewidth=2)
    if 0 < len(finite) < len(losses):
        ax.plot(len(finite) - 1, finite[-1], "x", color=line.get_color(), markersize=12, markeredgewidth=3)
ax.set(xlabel="step", ylabel="training loss", title="Digits, 32 channels whitened with 24 samples")
_ = ax.legend()

# %% [markdown]
# ## Ask
#
# `diagnose` goes around one forward and one backward pass of any model. It changes no output and no gradient.

# %%
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), Whitening(), nn.Linear(32, 10))
with orthocond.diagnose(model) as diagnosis:
    nn.functional.cross_entropy(model(images[:24]), labels[:24]).backward()
diagnosis

# %% [markdown]
# Twenty-four samples span at most 23 directions, and 32 channels have a 32x32 covariance. Nine eigenvalues are zero up
# to rounding. Clamped, their inverse roots are harmless in the forward pass; the gradient still divides by their
# differences.
#
# ## The second cause: equal eigenvalues
#
# With enough samples there is still the gradient. Differentiating through eigenvectors divides by $\lambda_i -
# \lambda_j$, so it loses digits as two eigenvalues approach each other, and is NaN when they meet. The exact gradient
# of a root divides by $\sqrt{\lambda_i} + \sqrt{\lambda_j}$ and has no such place.

# %%
torch.manual_seed(0)
Q, G = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q, torch.randn(6, 6, dtype=torch.float64)


def by_eigenvectors(A):
    l, U = torch.linalg.eigh(A)
    return U @ torch.diag(l.rsqrt()) @ U.mT


def gradient(function, A, dtype):
    A = A.detach().to(dtype).clone().requires_grad_()
    (function(A) * (G + G.mT).to(dtype)).sum().backward()
    return A.grad.double()


gaps = torch.logspace(0, -9, 28, dtype=torch.float64)
errors = {"through eigenvectors": [], "matrix_inv_sqrth": []}
for gap in gaps:
    A = Q @ torch.diag(torch.tensor([1, 1 + gap, 1 + 2 * gap, 4, 5, 6], dtype=torch.float64)) @ Q.mT
    A = (A + A.mT) / 2
    exact = gradient(matrix_inv_sqrth, A, torch.float64)
    for name, function in (("through eigenvectors", by_eigenvectors), ("matrix_inv_sqrth", matrix_inv_sqrth)):
        found = gradient(function, A, torch.float32)
        errors[name].append(((found - exact).norm() / exact.norm()).item())

figure, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
for name, values in errors.items():
    ax.loglog(gaps.tolist(), values, "o-", markersize=4, label=name)
ax.invert_xaxis()
ax.set(xlabel="distance between two eigenvalues", ylabel="relative error, float32", title="Gradient of $A^{-1/2}$")
_ = ax.legend()

# %% [markdown]
# Below a distance of about 1e-7 float32 has no digits between the eigenvalues, and the gradient through eigenvectors is
# noise or NaN. The other curve is flat.
#
# ## When the loss itself is at fault
#
# If the loss uses single eigenvectors of a repeated eigenvalue, no formula helps: another solver would return others.
# `diagnose` tells this case apart by the gradient that comes in.

# %%
A = (Q @ torch.diag(torch.tensor([1.0, 1, 1, 2, 3, 4], dtype=torch.float64)) @ Q.mT).requires_grad_()
with orthocond.diagnose() as diagnosis:
    U = torch.linalg.eigh(A).eigenvectors
    (U[:, 0] @ G[0]).backward()
finding = diagnosis.findings[0]
print(finding.verdict, "- consistent:", finding.consistent)
print(finding.advice)
