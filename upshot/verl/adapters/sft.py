"""verl's SFT trainer on local mode's examples, in local mode's order: `torchrun -m upshot.verl.adapters.sft …`.

verl shuffles by itself and leaves out what does not fill a batch, of held-out rows too; here a step takes the rows that
local mode would take, and an evaluation looks at all of its rows at once, so that its mean is one over tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import hydra
import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils.device import auto_set_device
from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

from upshot.config.load import load_recipe
from upshot.core.conversation import derive_seed
from upshot.training.loops.minibatches import pick
from upshot.verl.plan import RECIPE


class Examples(Dataset[dict[str, torch.Tensor]]):
    """Rendered dialogues: ids and loss mask (verl's `data.custom_cls`)."""

    def __init__(self, parquet_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1):
        import pyarrow.parquet as pq

        table = pq.read_table(str(parquet_files))
        self.ids, self.mask = table["ids"], table["mask"]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One row; past the end the last one again with nothing to learn, which fills up the ranks."""
        ids = torch.tensor(self.ids[min(index, len(self) - 1)].as_py(), dtype=torch.long)
        mask = torch.tensor(self.mask[index].as_py(), dtype=torch.long) if index < len(self) else torch.zeros_like(ids)
        return {"input_ids": ids, "position_ids": torch.arange(len(ids)), "loss_mask": mask}


class RankOrder(Sampler[int]):
    """This rank's rows of every step: together the ranks take what local mode takes."""

    def __init__(self, size: int, steps: int, batch: int, seed: int, rank: int, ranks: int) -> None:
        self.size, self.steps, self.batch, self.seed, self.rank, self.ranks = size, steps, batch, seed, rank, ranks

    def __len__(self) -> int:
        return self.steps * (self.batch // self.ranks)

    def __iter__(self) -> Iterator[int]:
        for step in range(self.steps):
            yield from pick(self.size, self.batch, step, self.seed)[self.rank :: self.ranks]

    def set_epoch(self, epoch: int) -> None:
        """verl tells of epochs; there is one."""


class SftTrainer(SFTTrainer):  # type: ignore[misc]
    """verl's, with our loaders."""

    def _build_dataloader(self) -> None:
        recipe = load_recipe(os.environ[RECIPE]).recipe
        rank, ranks = self.engine.get_data_parallel_rank(), self.engine.get_data_parallel_size()
        size, batch = len(self.train_dataset), int(self.config.data.train_batch_size)
        steps, seed = int(self.config.trainer.total_training_steps), derive_seed(recipe.seed, recipe.train.method)
        super()._build_dataloader()
        self.train_sampler = RankOrder(size, steps, batch, seed, rank, ranks)
        self.train_dataloader = self._loader(self.train_dataset, self.train_sampler, batch // ranks)
        if self.val_dataset is not None:
            own = range(rank, -(-len(self.val_dataset) // ranks) * ranks, ranks)
            self.val_dataloader = self._loader(self.val_dataset, own, len(own))

    def _loader(self, data: Examples, order: Any, batch: int) -> StatefulDataLoader:
        workers = self.config.data.num_workers
        return StatefulDataLoader(data, batch, sampler=order, collate_fn=self.collate_fn, num_workers=workers)


@hydra.main(config_path="pkg://verl.trainer.config", config_name="sft_trainer_engine", version_base=None)  # type: ignore[untyped-decorator]
def main(settings: Any) -> None:
    """What verl's own program does, with our trainer."""
    auto_set_device(settings)
    initialize_global_process_group()
    SftTrainer(config=settings).fit()
    destroy_global_process_group()


if __name__ == "__main__":
    main()
