"""Networks that the tests share, written like those that people have."""

import torch
from torch import nn

from cases import noise


class Net(nn.Module):
    """A residual network in small, with a stem to be whitened."""

    def __init__(self, bias=False):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        return self.head((x + self.body(x)).mean((2, 3)))


def trained(model, shape=(16, 3, 8, 8), steps=20):
    for seed in range(steps):
        model.train()(noise(*shape, seed=seed))
    return model.eval()


class BatchNormAct2d(nn.BatchNorm2d):
    """Written like timm's: a norm with dropout and activation inside, and a forward of its own."""

    def __init__(
        self,
        num_features,
        eps=1e-5,
        momentum=0.1,
        affine=True,
        track_running_stats=True,
        apply_act=True,
        act_layer=nn.ReLU,
        act_kwargs=None,
        inplace=True,
        drop_layer=None,
        device=None,
        dtype=None,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.drop = drop_layer() if drop_layer is not None else nn.Identity()
        self.act = act_layer(inplace=inplace, **(act_kwargs or {})) if act_layer and apply_act else nn.Identity()

    def forward(self, x):
        use_batch = self.training or (self.running_mean is None and self.running_var is None)
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        tracks = not self.training or self.track_running_stats
        statistics = (self.running_mean, self.running_var) if tracks else (None, None)
        x = nn.functional.batch_norm(x, *statistics, self.weight, self.bias, use_batch, self.momentum, self.eps)
        return self.act(self.drop(x))
