"""A treatment and condition numbers in the Trainer of Transformers; on several processes with DDP.

python examples/with_transformers.py [folder]
torchrun --standalone --nproc_per_node=2 examples/with_transformers.py [folder]
"""

import gc
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import gather
from sklearn.datasets import load_digits
from torch import nn
from transformers import Trainer, TrainingArguments

from orthocond.integrations.transformers import ConditionCallback, TreatmentCallback
from orthocond.nn import DecorrelatedBatchNorm2d


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 9, 3, bias=False)
        self.norm = DecorrelatedBatchNorm2d(9, sync=True)  # over all processes, where there are several
        self.head = nn.Linear(9 * 36, 10)

    def forward(self, x, labels):
        logits = self.head(self.norm(self.conv(x)).relu().flatten(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    data = [{"x": image, "labels": int(label)} for image, label in zip(images, labels, strict=True)]
    conditions, treatment = ConditionCallback(), TreatmentCallback("conv", "nog+ow+olr")
    trainer = Trainer(
        model=Digits(),
        args=TrainingArguments(
            output_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/transformers",
            max_steps=50,
            per_device_train_batch_size=64,
            learning_rate=0.05,
            optim="sgd",
            logging_steps=10,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=data,
        callbacks=[conditions, treatment],
    )
    trainer.train()

    total = gather(trainer.model.conv.weight.detach().sum().reshape(1))
    if trainer.is_world_process_zero():
        print(conditions.monitor)
        print("last step:", treatment.treatment.last)
        print("the same weights on all processes:", bool((total == total[0]).all()))


main()
# With nothing left that holds the process group, its threads end here. At exit they could abort the process.
gc.collect()
if dist.is_initialized():
    dist.destroy_process_group()
