"""A treatment and condition numbers in Lightning's Trainer; on several processes with DDP.

python examples/with_lightning.py [processes] [folder]
"""

import gc
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orthocond.integrations.lightning import ConditionCallback, TreatmentCallback
from orthocond.nn import DecorrelatedBatchNorm2d

processes = int(sys.argv[1]) if len(sys.argv) > 1 else 1
folder = sys.argv[2] if len(sys.argv) > 2 else "runs/lightning"


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 9, 3, bias=False)
        self.norm = DecorrelatedBatchNorm2d(9, sync=processes > 1)
        self.head = nn.Linear(9 * 36, 10)

    def training_step(self, batch, _):
        x, y = batch
        return F.cross_entropy(self.head(self.norm(self.conv(x)).relu().flatten(1)), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)]


def main() -> None:
    seed_everything(0, verbose=False)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    conditions, treatment = ConditionCallback(), TreatmentCallback("conv", "nog+ow+olr")
    trainer = Trainer(
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        max_epochs=2,
        log_every_n_steps=5,
        logger=CSVLogger(folder),
        callbacks=[conditions, treatment],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True, drop_last=True))

    total = trainer.strategy.all_gather(model.conv.weight.detach().sum())
    if trainer.is_global_zero:
        print(conditions.monitor)
        print("last step:", treatment.treatment.last)
        print("the same weights on all processes:", bool((total == total.reshape(-1)[0]).all()))


main()
# With nothing left that holds the process group, its threads end here. At exit they could abort the process.
gc.collect()
if dist.is_initialized():
    dist.destroy_process_group()
