# %% [markdown]
# Average pooling keeps the mean of each channel. Covariance pooling keeps how the channels vary together, which is what
# tells one texture from another. This notebook looks for textures in a photograph with both, and nothing is trained.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_image

from orthocond.nn import CovariancePool2d

temple, flower = (
    torch.from_numpy(load_sample_image(name).copy()).permute(2, 0, 1).float()[None] / 255
    for name in ("china.jpg", "flower.jpg")
)

# %% [markdown]
# ## Features
#
# Twelve channels for each pixel: derivatives of the brightness along both axes and the Laplacian, at two scales, split
# into positive and negative parts as a first layer with ReLU would. The colour is left out, so that only texture can
# tell places apart.


# %%
def features(image):
    grey = F.pad(image.mean(1, keepdim=True), [8] * 4, mode="reflect")
    sobel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 8
    laplace = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]]) / 4
    kernels = torch.stack([sobel, sobel.T, laplace])[:, None]
    fine = F.conv2d(grey, kernels, padding=1)
    coarse = F.conv2d(F.avg_pool2d(grey, 3, stride=1, padding=1), kernels, dilation=3, padding=3)
    signed = torch.cat([fine, coarse], 1)[..., 8:-8, 8:-8]
    return torch.cat([signed.relu(), (-signed).relu()], 1)


def windows(maps, size=24, stride=6):
    """Return the windows of a feature map as a batch (N, C, size, size), and how many there are in each direction."""
    found = maps.unfold(2, size, stride).unfold(3, size, stride)
    return found[0].permute(1, 2, 0, 3, 4).flatten(0, 1).contiguous(), found.shape[2:4]


pools = {
    "average pooling": lambda x: x.mean((2, 3)),
    "covariance pooling": CovariancePool2d(),
}
batch, grid = windows(features(temple))
print(batch.shape[0], "windows of", tuple(batch.shape[1:]))
print("covariance pooling gives each", pools["covariance pooling"](batch[:1]).shape[1], "numbers, average pooling 12")

# %% [markdown]
# ## Where does it look like here?
#
# The cross marks a place. The maps show how far every other window is from it, after each vector was divided by its
# length: dark is near.


# %%
def distance_maps(image, places):
    batch, (rows, columns) = windows(features(image))
    _, axes = plt.subplots(len(places), 3, figsize=(10.5, 2.5 * len(places)), layout="constrained")
    for line, (name, (x, y)) in zip(axes, places.items(), strict=True):
        here = (y - 12) // 6 * columns + (x - 12) // 6
        line[0].imshow(image[0].permute(1, 2, 0).numpy())
        line[0].plot(x, y, "P", color="red", markersize=12, markeredgecolor="white")
        line[0].set_title(name, fontsize=10)
        for ax, (pool, function) in zip(line[1:], pools.items(), strict=True):
            vectors = F.normalize(function(batch), dim=1)
            ax.imshow((vectors - vectors[here]).norm(dim=1).view(rows, columns).numpy(), cmap="magma")
            ax.set_title(pool, fontsize=10)
        for ax in line:
            ax.axis("off")


distance_maps(temple, {"tiles": (200, 340), "trees": (480, 380), "sky": (480, 60)})

# %%
distance_maps(flower, {"petals": (280, 240), "leaves": (60, 180)})

# %% [markdown]
# ## How often is the nearest window of the same kind?
#
# Six regions marked by hand, cut into windows that don't overlap. For each window the nearest other one is looked up.

# %%
regions = {  # image, left, top, right, bottom
    "sky": (temple, 330, 20, 620, 160),
    "temple": (temple, 140, 130, 310, 340),
    "trees": (temple, 360, 350, 620, 427),
    "water": (temple, 340, 250, 540, 330),
    "petals": (flower, 200, 140, 420, 320),
    "leaves": (flower, 10, 10, 160, 400),
}
found = [
    windows(features(image)[..., top:bottom, left:right], stride=24)[0]
    for image, left, top, right, bottom in regions.values()
]
batch = torch.cat(found)
kind = torch.cat([torch.full((len(one),), i) for i, one in enumerate(found)])
for name, function in pools.items():
    vectors = F.normalize(function(batch), dim=1)
    nearest = torch.cdist(vectors, vectors).fill_diagonal_(torch.inf).argmin(1)
    print(f"{name:20} {100 * (kind[nearest] == kind).float().mean().item():.0f}% of {len(batch)} windows")

# %% [markdown]
# This is a look at two photographs, not a benchmark; [what was found](../results.md) has runs on CIFAR-10.
#
# ## Flat windows
#
# A window of a constant colour has a covariance of zero, where the usual gradient of the root divides zero by zero.
# Pooling maps the null space to zero, forward and backward. The tests of the library check this for every kind of
# singular covariance.

# %%
flat = torch.full((1, 12, 24, 24), 0.3, requires_grad=True)
pools["covariance pooling"](flat).sum().backward()
print("gradient finite:", bool(flat.grad.isfinite().all()))

l, U = torch.linalg.eigh(A := torch.zeros(12, 12, requires_grad=True))
(U @ torch.diag(l.sqrt()) @ U.mT).sum().backward()
print("as usually written:", bool(A.grad.isfinite().all()))
