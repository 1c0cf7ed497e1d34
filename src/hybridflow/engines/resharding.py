"""Resharding: from the shards of training to what each rank loads or sends, without whole tensors on the others.

    rank        0        1        2        3           a weight of 8 rows, trained on 4 ranks
    holds     0 1      2 3      4 5      6 7           shards of FSDP2
    wants  0 1 2 3   4 5 6 7  0 1 2 3  4 5 6 7         two engines with tensor parallel size 2
    receives  2 3   4 5 6 7   0 1 2 3  4 5             only the elements that it wants and does not hold

What a rank holds and wants are boxes, so that rows, columns and trainers with tensor parallel are one case. So is a
rank that sends weights to another pool: it wants all elements, and the other ranks want none.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.errors import WeightSyncError
from hybridflow.runtime.boxes import (
    Box,
    box_of_shard,
    box_shape,
    empty_box,
    intersection,
    local,
    num_elements,
    part_of,
    whole_box,
)
from hybridflow.runtime.splitmix import STEP, mixed


class Resharding:
    """One transfer of weights in which each rank receives the box of each parameter that it loads.

    All ranks of the default group make the same calls in the same order. `parameters` are the trainer's, `wanted` has
    the boxes of this rank by name, `dtype_of` returns the dtype in which a parameter is sent. A parameter without a box
    on one of the ranks is not in the resharding, nor is one that all ranks want whole, for which an all-gather is
    better. One all-to-all sends as many parameters of one dtype as have together at most `at_once` bytes, or one
    larger parameter.

    Raises WeightSyncError, on all ranks, if the boxes of the ranks together are not the whole parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        wanted: Mapping[str, Box],
        device: torch.device,
        dtype_of: Callable[[str], torch.dtype],
        at_once: int,
    ) -> None:
        self._rank, self._parameters, self._device, self._dtype_of = dist.get_rank(), parameters, device, dtype_of
        mine = {name: (box_of_shard(p), wanted[name]) for name, p in parameters.items() if name in wanted}
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        self._boxes: dict[str, list[tuple[Box, Box]]] = {
            name: [boxes[name] for boxes in of_ranks] for name in mine if all(name in boxes for boxes in of_ranks)
        }
        self._sliced: set[str] = set()  # parameters of which a rank wants a part
        for name, boxes in list(self._boxes.items()):
            distinct, shape = {wanted for _, wanted in boxes}, parameters[name].shape
            if distinct - {whole_box(shape), empty_box(shape)}:
                self._sliced.add(name)
            if distinct == {whole_box(shape)}:
                del self._boxes[name]
            elif (covered := sum(map(num_elements, distinct))) != (numel := shape.numel()):
                raise WeightSyncError(
                    f"weight '{name}': the ranks of the rollout engines load {covered} elements in different slices, "
                    f"but the weight has {numel}."
                )
        self._bucket_of = self._plan(at_once)
        self._received: dict[str, tuple[Tensor, int]] = {}
        self._sums_sent: dict[str, Tensor] = {}  # for each rank the sum of what it was sent; that of this rank's shard
        self._sums_received: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._boxes

    def receive(self, name: str) -> tuple[Tensor, int]:
        """Return the part of a parameter that this rank wants, and the number of bytes that other ranks sent for it.

        The part is in new memory on the device, and is forgotten here; `verify` checks slices. The first call for a
        parameter of a bucket receives all of them.

        Raises WeightSyncError if the shards of the ranks do not have each of its elements once.
        """
        if name not in self._received:
            self._exchange(self._bucket_of[name])
        return self._received.pop(name)

    def verify(self) -> None:
        """Compare the checksums of the trainer's shards with those of the slices received since the last call.

        Raises WeightSyncError, on all ranks, if a slice differs from the trainer's elements at these positions, or if
        the slices of the ranks together are not the whole tensor.
        """
        if not self._sums_sent:
            return
        names = list(self._sums_sent)
        sent, received = (torch.stack(list(sums.values())).cpu() for sums in (self._sums_sent, self._sums_received))
        dist.all_reduce(sent)
        wrong = sent[:, self._rank] != received
        for row, name in enumerate(names):
            wanted = [box for _, box in self._boxes[name]]
            distinct = [wanted.index(box) for box in dict.fromkeys(wanted)]
            wrong[row] |= sent[row, distinct].sum() != sent[row, -1]
        on_ranks = wrong.int()
        dist.all_reduce(on_ranks)
        if found := [name for name, count in zip(names, on_ranks.tolist(), strict=True) if count]:
            raise WeightSyncError(
                f"{len(found)} weight(s), the first is '{found[0]}', differ between the trainer and the slices for the "
                "rollout engines: the checksums do not add up."
            )
        self._sums_sent, self._sums_received = {}, {}

    def _plan(self, at_once: int) -> dict[str, list[str]]:
        """Return the names that are exchanged together with each parameter, in the order of the parameters."""
        buckets: dict[torch.dtype, tuple[list[str], int]] = {}
        bucket_of: dict[str, list[str]] = {}
        for name in self._boxes:
            dtype = self._dtype_of(name)
            num_bytes = self._parameters[name].numel() * dtype.itemsize
            names, used = buckets.get(dtype, ([], 0))
            if used + num_bytes > at_once:
                names, used = [], 0
            names.append(name)
            buckets[dtype], bucket_of[name] = (names, used + num_bytes), names
        return bucket_of

    def _exchange(self, names: Sequence[str]) -> None:
        """Receive this rank's parts of some parameters of one dtype. Its own elements are not sent."""
        me, dtype, num_ranks = self._rank, self._dtype_of(names[0]), dist.get_world_size()
        outgoing: list[list[Tensor]] = [[] for _ in range(num_ranks)]
        incoming: list[list[Tensor]] = [[] for _ in range(num_ranks)]  # where elements of each rank belong
        for name in names:
            held, wanted = zip(*self._boxes[name], strict=True)
            shard = local(self._parameters[name]).detach().to(self._device, dtype)
            pieces, parts = plan_exchange(held, wanted, me)
            if sum(num_elements(box) for box in parts if box) != num_elements(wanted[me]):
                raise WeightSyncError(
                    f"weight '{name}': this rank's engine loads the box {wanted[me]}, but the trainer's ranks have "
                    f"{', '.join(map(str, dict.fromkeys(held)))}: not each element once."
                )
            result = torch.empty(box_shape(wanted[me]), dtype=dtype, device=self._device)
            num_bytes = 0
            for rank, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
                if rank == me and part:
                    part_of(result, wanted[me], part).copy_(part_of(shard, held[me], part))
                elif rank != me and part:
                    incoming[rank].append(part_of(result, wanted[me], part))
                    num_bytes += num_elements(part) * dtype.itemsize
                if rank != me and piece:
                    outgoing[rank].append(part_of(shard, held[me], piece).reshape(-1))
            self._received[name] = result, num_bytes
            if name in self._sliced:
                self._sums_sent[name] = self._sums_of(name, shard, pieces)
        _all_to_all(outgoing, incoming, dtype, self._device)
        for name in filter(self._sliced.__contains__, names):
            boxes, wanted = self._boxes[name], self._boxes[name][me][1]
            words = word_bytes([box for pair in boxes for box in pair], dtype.itemsize)
            self._sums_received[name] = checksum_of_box(self._received[name][0], wanted, words)

    def _sums_of(self, name: str, shard: Tensor, pieces: Sequence[Box | None]) -> Tensor:
        """Return the checksum of each piece of this rank's shard, and of the shard if no rank before has it too."""
        held, wanted = zip(*self._boxes[name], strict=True)
        me = self._rank
        num_bytes = word_bytes([*held, *wanted], shard.element_size())
        whole = held[me] if held.index(held[me]) == me and shard.numel() else None
        boxes = [*pieces, whole]
        sums = {box: checksum_of_box(part_of(shard, held[me], box), box, num_bytes) for box in {*boxes} - {None} if box}
        nothing = torch.zeros((), dtype=torch.int64, device=shard.device)
        return torch.stack([sums[box] if box else nothing for box in boxes])


def _all_to_all(
    outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]], dtype: torch.dtype, device: torch.device
) -> None:
    """Send the elements of some tensors to each rank, and copy those of each rank into other tensors."""
    sizes = [dtype.itemsize * sum(tensor.numel() for tensor in of_rank) for of_rank in incoming]
    packed = torch.cat([torch.empty(0, dtype=dtype, device=device), *(x for of_rank in outgoing for x in of_rank)])
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    sent = [sum(tensor.nbytes for tensor in of_rank) for of_rank in outgoing]
    dist.all_to_all_single(buffer, packed.view(torch.uint8), sizes, sent)
    targets = [target for of_rank in incoming for target in of_rank]
    elements = buffer.view(dtype).split([target.numel() for target in targets])
    for target, received in zip(targets, elements, strict=True):
        target.copy_(received.view(target.shape))


def plan_exchange(held: Sequence[Box], wanted: Sequence[Box], me: int) -> tuple[list[Box | None], list[Box | None]]:
    """Return the boxes that rank `me` sends to each rank, and those that it receives from each, both with itself.

    Of ranks that hold the same box, as with tensor parallel, one sends it: the receiver to itself if it is one of them,
    otherwise they take turns.
    """
    holders: dict[Box, list[int]] = {box: [] for box in held}
    for rank, box in enumerate(held):
        holders[box].append(rank)

    def sends(rank: int, receiver: int) -> bool:
        ranks = holders[held[rank]]
        return rank == (receiver if receiver in ranks else ranks[receiver % len(ranks)])

    sent = [intersection(held[me], box) if sends(me, rank) else None for rank, box in enumerate(wanted)]
    received = [intersection(box, wanted[me]) if sends(rank, me) else None for rank, box in enumerate(held)]
    return sent, received


PART = 2**22
"""Words that are mixed at once."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def word_bytes(boxes: Sequence[Box], itemsize: int) -> int:
    """Return the size of the words, at most 8 bytes, that no box of a tensor cuts in its last dimension."""
    return math.gcd(8, *(itemsize * cut for box in boxes for cut in (box[-1] if box else (1,))))


def checksum_of_box(contents: Tensor, box: Box, num_bytes: int) -> Tensor:
    """Return the checksum of a box, an int64 without dimensions on its device, in words of `num_bytes`.

    The sums of boxes that tile a tensor are the sum of the tensor: each word is mixed with an odd constant of its
    position in the whole tensor, and all are added modulo 2**64. Mixing is one-to-one, so a change of a single word
    always changes the sum; other changes cancel only by chance.
    """
    if not contents.numel():
        return torch.zeros((), dtype=torch.int64, device=contents.device)
    if not box:
        contents, box = contents.view(1), ((0, 1),)
    words = contents.contiguous().view(-1).view(WORDS[num_bytes])
    first, end = box[-1]
    elements = num_bytes // contents.element_size()
    box = *box[:-1], (first // elements, end // elements)
    words = words.view(box_shape(box))
    rows = max(1, PART * len(words) // words.numel())
    sums = []
    for start in range(0, len(words), rows):
        part = words[start : start + rows].to(torch.int64)
        top = box[0][0] + start
        for dim, (first, end) in enumerate(((top, top + len(part)), *box[1:])):
            constants = _constants(first, end, dim, words.device)
            part = part * constants.view(-1, *[1] * (part.ndim - dim - 1))
        sums.append(mixed(part).sum())
    return torch.stack(sums).sum()


def _constants(first: int, end: int, dim: int, device: torch.device) -> Tensor:
    """Return pseudorandom odd numbers for the positions first to end of a dimension."""
    return mixed((torch.arange(first, end, device=device) + (dim << 40) + 1) * STEP) | 1
