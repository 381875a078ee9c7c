"""Batches made in other processes while the model learns from the ones before.

Where the model is on a GPU, drawing images on one core would take longer than learning from them.
"""

from __future__ import annotations

import pickle
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor

_task: Any = None  # of a worker's process


class Prefetcher:
    """The batches of a task, the same as its own.

    Args:
        task: a `scripts.training.generator.Task` that can be pickled.
        workers: processes, one thread each.
    """

    def __init__(self, task: Any, workers: int) -> None:
        self._ahead = 3 * workers
        # as bytes: multiprocessing itself would share tensors by open files, one for each
        begin = (pickle.dumps(task),)
        self._pool = ProcessPoolExecutor(
            workers, mp_context=get_context("spawn"), initializer=_begin, initargs=begin
        )
        self._waiting: dict[tuple[int, int], Future[tuple[np.ndarray, np.ndarray]]] = {}

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """See `Task`; the steps after this one are begun too."""
        for k in range(step, step + self._ahead):
            if (k, size) not in self._waiting:
                self._waiting[k, size] = self._pool.submit(_make, k, size)
        ids, labels = self._waiting.pop((step, size)).result()
        return torch.from_numpy(ids), torch.from_numpy(labels)

    def close(self) -> None:
        """Ends the processes; what they have not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _begin(task: bytes) -> None:
    global _task
    torch.set_num_threads(1)
    _task = pickle.loads(task)  # of the process that began this one


def _make(step: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    ids, labels = _task.batch(step, size)
    return ids.numpy(), labels.numpy()
