# %% [markdown]
# A convolution from 1 to 16 channels with 3x3 kernels sees 9 numbers at a time. Its 16 channels span 9 dimensions at
# most, so their covariance has seven eigenvalues that are rounding noise. This notebook whitens such a layer, watches
# its spectrum, and shows what the noise does. The data are real scans of digits that come with scikit-learn.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import orthocond
from orthocond.linalg import covariance, spectrum
from orthocond.nn import DecorrelatedBatchNorm2d

images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
images = (torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16)[order]
labels = torch.tensor(labels)[order]
(x_train, y_train), (x_test, y_test) = (images[:1300], labels[:1300]), (images[1300:], labels[1300:])


def network(norm):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, bias=False), norm, nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def error(model):
    model.eval()
    with torch.no_grad():
        return 100 * (model(x_test).argmax(1) != y_test).float().mean().item()


def train(model, spec="none", steps=150):
    treatment = orthocond.treat(model, "0", spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    treatment.attach(optimizer)
    model.train()
    errors = []
    with orthocond.ConditionMonitor(model, layers=["1"]) as monitor:
        for step in range(steps):
            batch = torch.randint(len(x_train), (64,), generator=torch.Generator().manual_seed(step))
            loss = F.cross_entropy(model(x_train[batch]), y_train[batch]) + treatment.penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 9:
                errors.append(error(model))
                model.train()
    return monitor, errors


# %% [markdown]
# ## The spectrum
#
# Nine eigenvalues are features; the other seven are at the rounding error of float32, seven orders of magnitude below.

# %%
model = network(DecorrelatedBatchNorm2d(16))
features = model[0](x_train[:256]).detach()
found = spectrum(covariance(features.movedim(1, 0).flatten(1)))
figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
colours = ["tab:blue" if i < found.rank else "tab:red" for i in range(16)]
ax.bar(range(1, 17), found.eigenvalues.abs().tolist(), color=colours)
ax.set(yscale="log", xlabel="eigenvalue", ylabel="size", title=f"16 channels, rank {found.rank.item()}: red is noise")
print(f"condition number {found.cond.item():.1e}, on the support {found.cond_support.item():.1f}")

# %% [markdown]
# ## What the noise does
#
# Three whitenings of the same stem and a batch norm, tested every ten steps with their running statistics. The running
# whitening matrix of one batch meets the noise of another, and what it blows up stays.

# %%
variants = {
    "rank-aware (rtol=1e-4, the default)": DecorrelatedBatchNorm2d(16),
    "nothing dropped, eps=1e-5": DecorrelatedBatchNorm2d(16, eps=1e-5, rtol=0.0),
    "nothing dropped, eps=1e-8": DecorrelatedBatchNorm2d(16, eps=1e-8, rtol=0.0),
    "batch norm": nn.BatchNorm2d(16),
}
figure, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
for name, norm in variants.items():
    _, errors = train(network(norm))
    ax.plot(range(10, 151, 10), errors, "o-", markersize=3, label=f"{name}: {errors[-1]:.1f}%")
ax.set(xlabel="step", ylabel="test error %", yscale="log", title="One run each, digits")
_ = ax.legend(fontsize=8)

# %% [markdown]
# One run of a small network on an easy task: it shows the mechanism, not how much it matters elsewhere. [On real
# data](../results.md) has CIFAR-10 with several seeds.
#
# ## Watching it
#
# The monitor takes the eigenvalues that the layer has anyway. `gauge` replaces the weight by one with the same output
# and a covariance near the identity, so it takes the condition number down without changing what the network computes.

# %%
figure, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
for spec in ("none", "nog", "ow", "gauge"):
    monitor, _ = train(network(DecorrelatedBatchNorm2d(16)), spec)
    history = monitor.history()
    ax.semilogy([r["step"] for r in history], [r["cond_support"] for r in history], label=spec)
ax.set(xlabel="step", ylabel="condition number on the support", title="Treatments of the stem")
_ = ax.legend()

# %%
monitor
