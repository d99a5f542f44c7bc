"""Recommendation packages."""

from __future__ import annotations

from typing import Any

import torch
from comparison import Example


def recbole() -> Example:
    """GRU4Rec of RecBole on made histories of items."""
    from recbole.config import Config
    from recbole.data.interaction import Interaction
    from recbole.model.sequential_recommender import GRU4Rec

    class Items:
        """The part of a dataset that the model reads: the number of items."""

        def num(self, _: str) -> int:
            return 50

    own = {
        "embedding_size": 16,
        "hidden_size": 32,
        "dropout_prob": 0.0,
        "loss_type": "CE",
        "train_neg_sample_args": None,
    }
    config = Config(model="GRU4Rec", dataset="ml-100k", config_dict=own | {"use_gpu": False})
    model = GRU4Rec(config, Items())
    batches = []
    for _ in range(2):
        lengths = torch.randint(1, 21, (16,))
        rows = {"item_id_list": torch.randint(1, 50, (16, 20)), "item_length": lengths}
        batches.append(rows | {"item_id": torch.randint(1, 50, (16,))})

    def loss(module: Any, batch: Any) -> Any:
        rows = Interaction(batch)
        return module.calculate_loss(rows), module.full_sort_predict(rows)

    return Example(model, batches, loss)
