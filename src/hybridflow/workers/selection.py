"""Token selection for policy losses that need it: a separate pass over a mini-batch before its optimizer step."""

from collections.abc import Mapping
from typing import Any

import torch

from hybridflow.algorithms import covariances
from hybridflow.config import Config
from hybridflow.engines import TrainEngine
from hybridflow.protocol import DataProto
from hybridflow.runtime import derive_seed
from hybridflow.workers.algorithm_functions import token_selection


def with_selected_tokens(
    config: Config, engine: TrainEngine, rows: DataProto, meta_info: Mapping[str, Any], number: int
) -> DataProto:
    """Add the column `selected_tokens` to this rank's rows of a mini-batch, if the policy loss selects tokens.

    Every rank sees the covariances of all tokens, sorted by row and position, so that the selection is the same on any
    number of ranks. `meta_info["seed_keys"]` and the `number` of the optimizer step seed random selections.
    """
    select = token_selection(config)
    if select is None:
        return rows
    columns = rows.batch
    mask = columns["response_mask"].bool()
    log_probs = engine.forward(rows, temperature=config.rollout.temperature)["log_probs"]
    row, position = mask.nonzero(as_tuple=True)
    own = (
        columns["row_ids"][row] * config.data.max_response_length + position,  # widths may differ between ranks
        log_probs[mask],
        columns["advantages"].expand(mask.shape)[mask],
    )
    keys, of_log_probs, of_advantages = (torch.cat(parts) for parts in zip(*engine.gather(own), strict=True))
    order = keys.argsort()
    chosen = torch.zeros(len(keys), dtype=torch.bool)
    if len(keys):
        of_tokens = covariances(of_log_probs[order], of_advantages[order])
        chosen = select(covariances=of_tokens, seed=derive_seed(*meta_info["seed_keys"], number))
    selected = torch.zeros_like(mask)
    selected[mask] = torch.isin(own[0], keys[order][chosen])
    return rows.union(DataProto.from_dict({"selected_tokens": selected}))
