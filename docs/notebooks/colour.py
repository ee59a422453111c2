# %% [markdown]
# [`whiten_color`](../reference/nn.md#orthocond.nn.whiten_color) gives one image the mean and the covariance of another.
# It whitens the content with $P_c^{-1/2}$ and colours it with $P_s^{1/2}$, so it needs both roots of a covariance. The
# two photographs come with scikit-learn.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_image

from orthocond.linalg import covariance, spectrum
from orthocond.nn import whiten_color


def photograph(name):
    return torch.from_numpy(load_sample_image(name).copy()).permute(2, 0, 1).float()[None] / 255


def show(images, width=3.6):
    _, axes = plt.subplots(1, len(images), figsize=(width * len(images), width * 0.75), layout="constrained")
    for ax, (title, image) in zip(axes, images.items(), strict=True):
        ax.imshow(image[0].clamp(0, 1).permute(1, 2, 0).numpy())
        ax.set_title(title, fontsize=10)
        ax.axis("off")


temple, flower = photograph("china.jpg"), photograph("flower.jpg")

# %% [markdown]
# ## Colours
#
# Three channels, one sample for each pixel. The covariance is 3x3, and each photograph takes on the palette of the
# other.

# %%
show(
    {
        "the temple": temple,
        "the flower": flower,
        "the temple in the flower's colours": whiten_color(temple, flower),
        "the flower in the temple's colours": whiten_color(flower, temple),
    },
    width=3,
)

# %% [markdown]
# Up to rounding in float32, the result has the style's mean and covariance:

# %%
result = whiten_color(temple, flower)


def moments(image):
    return image.flatten(2).mean(-1), covariance(image.flatten(2))


for ours, style in zip(moments(result), moments(flower), strict=True):
    print(f"largest difference: {(ours - style).abs().max():.1e}")

# %% [markdown]
# ## Halfway
#
# Whitening needs no choice of eigenvectors, so the transfer is a smooth function of both images, and so are mixtures.

# %%
show({f"{share:.0%} of the palette": torch.lerp(temple, result, share) for share in (0.0, 0.33, 0.67, 1.0)}, width=2.6)

# %% [markdown]
# ## Colours and edges
#
# `pixel_unshuffle` makes 12 channels of 2x2 pixels. Their covariance also knows how neighbouring pixels differ, so the
# result takes over some of the style's softness or sharpness, not only its palette.

# %%
even = [image[..., :426, :640] for image in (temple, flower)]
blocks = [F.pixel_unshuffle(image, 2) for image in even]
with_edges = F.pixel_shuffle(whiten_color(*blocks), 2)
crop = (..., slice(60, 220), slice(200, 440))
show(
    {
        "the temple, a detail": even[0][crop],
        "colours alone": whiten_color(*even)[crop],
        "colours and edges": with_edges[crop],
    }
)

# %% [markdown]
# ## What a singular style does
#
# A grey style has three equal channels, and its covariance has rank 1. Colouring with it is no problem: the result is
# grey.

# %%
grey = temple.mean(1, keepdim=True).expand_as(temple) + 0.0
found = spectrum(covariance(grey.flatten(2)), rtol=1e-6)
print("eigenvalues:", ", ".join(f"{value:.1e}" for value in found.eigenvalues[0].tolist()), "- rank", found.rank.item())
show({"the flower": flower, "in the style of a grey photograph": whiten_color(flower, grey)})

# %% [markdown]
# A grey *content* is the hard case, because whitening inverts its covariance. Here is a sepia print, stored with 8
# bits: two of its three directions hold nothing but the rounding to whole numbers. Whitening as it is usually written
# gives that noise the same size as the picture. With `rtol` the directions are dropped, and the picture has one axis of
# the flower's colours.


# %%
def usual(content, style):
    """Whitening and colouring as it is usually written."""
    c, s = content.flatten(2)[0].double(), style.flatten(2)[0].double()
    c, mean = c - c.mean(1, keepdim=True), s.mean(1, keepdim=True)
    (lc, uc), (ls, us) = (torch.linalg.eigh(covariance(x)) for x in (c, s))
    white = uc @ torch.diag(lc.rsqrt()) @ uc.mT @ c
    return (us @ torch.diag(ls.clamp(min=0).sqrt()) @ us.mT @ white + mean).float().view_as(content)


sepia = (255 * grey * torch.tensor([1.0, 0.89, 0.71]).view(3, 1, 1)).round() / 255
found = spectrum(covariance(sepia.double().flatten(2)))
print("eigenvalues:", ", ".join(f"{value:.1e}" for value in found.eigenvalues[0].tolist()))
show(
    {
        "a sepia print": sepia,
        "as usually written": usual(sepia, flower),
        "whiten_color, rtol=1e-3": whiten_color(sepia, flower, rtol=1e-3),
    }
)

# %% [markdown]
# ## Gradients
#
# Gradients flow to content and style, and are finite for the singular covariance as well. Here a style is *found*:
# eight steps of gradient descent on the pixels of a small image, until it gives the temple the flower's mean and
# covariance.

# %%
small, target = (F.interpolate(image, size=(54, 80), mode="area") for image in (temple, flower))
style = grey[..., ::8, ::8].clone().requires_grad_()  # begins with rank 1
optimizer = torch.optim.Adam([style], lr=0.05)
for step in range(9):
    made = whiten_color(small, style)
    loss = sum((a - b).square().sum() for a, b in zip(moments(made), moments(target), strict=True))
    optimizer.zero_grad()
    loss.backward()
    assert style.grad.isfinite().all()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
