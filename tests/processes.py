"""Several processes of one test."""

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed

LOOPBACK = {"linux": "lo", "darwin": "lo0"}
"""The name of the network interface that needs no network; on Windows it has none that is always the same."""


def join(rank: int, folder: str, size: int = 2) -> None:
    """Be process ``rank`` of ``size``, which meet in a file of ``folder``."""
    if sys.platform in LOOPBACK:
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK[sys.platform]
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", Path(folder, "rendezvous").as_uri(), rank=rank, world_size=size)


def leave() -> None:
    """End this process: threads of a group that outlive it would abort the interpreter while it shuts down."""
    gc.collect()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
