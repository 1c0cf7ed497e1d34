"""Lending (placement.lend): training ranks that wait for a batch generate prompts of it that no engine has started.

    rollout engines   generate batch n ─── give_waiting ─── generate ─── give_waiting ─── generate ──┐
    training ranks                         generate_sequences            generate_sequences ─────────┴─ batch n

Lending ends when no group of the batch waits. Then each group has started, and the batch ends as without lending.
"""

from itertools import chain

import numpy as np

from hybridflow.config import Config
from hybridflow.controller import WorkerGroup
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.begun import Begun, Lendable
from hybridflow.workers.generating import ROLLOUT_MESH


class Lending:
    """A function that completes a batch with the help of the training ranks. `metrics` are of the last call.

    In each round they take half of their share of the groups that wait (Hummel et al., 1992, "Factoring",
    https://doi.org/10.1145/135226.135232), so that they are not the last ones to finish.
    """

    def __init__(self, config: Config, rollout: WorkerGroup, actor: WorkerGroup) -> None:
        self._group_size, self._rollout, self._actor = config.rollout.group_size, rollout, actor
        lent, own = (group.mesh(ROLLOUT_MESH).axes["data"] for group in (actor, rollout))
        self._share = lent / (lent + own) / 2
        self.metrics: dict[str, float] = {}

    def begin(self, prompts: DataProto) -> Lendable:
        """Begin to generate the responses to `prompts` in the rollout engines."""
        noise_key = {"noise_key": prompts.meta_info["noise_key"]}
        begun = self._rollout.begin_sequences.remote(prompts).with_meta_info(noise_key)
        rows = self._rollout.finish_sequences.remote(begun)
        return Lendable(prompts, begun, prompts.repeat(self._group_size, interleave=True).union(rows))

    def __call__(self, begun: Begun) -> Begun:
        """Return the batch when no group of it waits, with lent groups in the places of their prompts.

        A batch that is restored, or was completed before, is returned as it is. Raises the errors of generation.
        """
        if begun.lendable is not None:
            lent, parts = self._lend(begun.lendable)
            whole = self._joined(begun.parts[0], lent, parts) if lent else begun.parts[0]
            begun = Begun(begun.step, (whole,), begun.greedy, num_lent=len(lent))
        self.metrics = {"sampling/lent_groups": float(begun.num_lent)}
        return begun

    def _lend(self, batch: Lendable) -> tuple[list[int], list[DataProtoFuture]]:
        """Return the indices of the prompts that the training ranks have generated, and their rows in this order."""
        prompts, key = batch.prompts, batch.prompts.meta_info["noise_key"]
        index_of = {group: index for index, group in enumerate(prompts.batch["group_ids"].tolist())}
        lent: list[int] = []
        parts: list[DataProtoFuture] = []
        batch.begun.get(())  # in the engines
        while given := set(chain.from_iterable(self._rollout.give_waiting(key, self._share))):
            indices = sorted({index_of[group] for group in given}.difference(lent))
            if not indices:  # copies, given to an engine for which there was no prompt
                continue
            parts.append(self._actor.generate_sequences.remote(prompts.select_idxs(indices)))
            parts[-1].get(())
            lent += indices
        return lent, parts

    def _joined(self, own: DataProtoFuture, lent: list[int], parts: list[DataProtoFuture]) -> DataProtoFuture:
        """Return the rows of the batch in the order of its prompts."""
        size, columns = self._group_size, parts[0].columns or ()
        places = np.arange(len(own) // size)
        places[lent] = len(places) + np.arange(len(lent))
        rows = (places[:, None] * size + np.arange(size)).ravel()
        lent_rows = [part.with_meta_info(own.meta_info) for part in parts]
        generated = DataProtoFuture.concat([own.select_columns(columns), *lent_rows])
        others = own.select_columns([name for name in own.columns or () if name not in columns])
        return others.union(generated.select_rows(rows))
