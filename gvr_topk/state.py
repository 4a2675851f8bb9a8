"""State that one step leaves for the next, by slot: the only data carried over between calls of the op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gvr_topk.arguments import Checks
from gvr_topk.constants import MAX_ROWS, MAX_WIDTH, STATE_FLOATS, STATE_UNKNOWN

NAME = "gvr_topk.TopkState"
"""What the error messages of a state begin with."""


def accept_rows(checks: Checks, words: Tensor, next_state: Tensor, slots: Tensor, accepted: Tensor) -> None:
    """Do for any number of layers at once what `TopkState.accept` does for one, and raise as it does.

    The state of the slots, ``[..., slots, 4]``, is updated in place from ``[..., requests * next_n, 4]``.
    """
    shape = (*words.shape[:-2], None, STATE_FLOATS)
    checks.tensor("next_state", next_state, words, torch.float32, shape, strided=True)
    checks.integers("slots", slots, words, (None,))
    requests, rows, count = slots.shape[0], next_state.shape[-2], words.shape[-2]
    checks.integers("accepted", accepted, words, (requests,))
    if rows % max(requests, 1) != 0:
        raise checks.fail("next_state", f"a multiple of {requests} rows", rows)
    if requests == 0 or rows == 0:
        return
    next_n = rows // requests
    before = torch.arange(-1, rows - 1, next_n, device=slots.device)
    left = next_state.index_select(-2, before + accepted.to(torch.int64).clamp(1, next_n))
    # Requests without a slot write to a spare slot behind the others: `clamp` gives -1 or `count`, and
    # `remainder` maps both to the spare slot.
    target = slots.to(torch.int64).clamp(-1, count).remainder(count + 1)
    spare = torch.cat((words, words.new_empty((*words.shape[:-2], 1, STATE_FLOATS))), dim=-2)
    unknown = left[..., :1] == STATE_UNKNOWN
    spare.index_copy_(-2, target, torch.where(unknown, spare.index_select(-2, target), left))
    words.copy_(spare[..., :count, :])


def fill_chosen(
    checks: Checks,
    argument: str,
    chosen: int | Sequence[int] | Tensor | None,
    tensors: Sequence[tuple[Tensor, float]],
) -> None:
    """Fill the chosen rows of tensors that have as many rows, each tensor with its value.

    What can be chosen, and what is raised, is as for `TopkState.reset`; `argument` is what errors call it.
    """
    like, count = tensors[0][0], tensors[0][0].shape[0]
    if isinstance(chosen, Tensor):
        checks.integers(argument, chosen, like, (None,))
        # All numbers that are no row share the last element, which is left out.
        is_chosen = torch.zeros(count + 1, dtype=torch.bool, device=like.device)
        is_chosen.index_fill_(0, chosen.to(torch.int64).clamp(-1, count).remainder(count + 1), True)
        for tensor, value in tensors:
            tensor.masked_fill_(is_chosen[:-1, None], value)
        return
    parts: list[slice | int] = [slice(None)]
    if chosen is not None:
        numbers = chosen if isinstance(chosen, Sequence) and not isinstance(chosen, str) else [chosen]
        parts = [checks.integer(argument, number, 0, count - 1) for number in numbers]
    for part in parts:
        for tensor, value in tensors:
            tensor[part].fill_(value)


class TopkState:
    """State of `slots` requests in one layer, read and written by `gvr_topk.indexer_topk_decode`.

    A slot holds a prediction of the request's next k-th value, 16 bytes in the kernels' own format, and,
    unless `keep_indices` is false, the positions that were chosen last. Any content is safe: a state that
    belongs to another request, or to none, costs time and never changes a result.

    Parameters
    ----------
    slots : int
        Requests that can have a state at once, 1 to 2**26.
    k : int
        Items per row, 1 to 2**21.
    device : torch.device or str, default "cpu"
        The scores' device. PyTorch's default device (`torch.set_default_device`) does not count.
    keep_indices : bool, default True
        Whether the chosen positions are kept. Only path ``"paper_gvr"`` and the ``hits`` column of the
        statistics read them, so serving wants false: a slot then takes 16 bytes instead of ``16 + 4 * k``.

    Attributes
    ----------
    words : Tensor, ``[slots, 4]``, float32, contiguous
        Predictions. Opaque: pass them on, copy them, save them, but do not interpret them.
    indices : Tensor, ``[slots, k]``, int32, or None
        Positions that were chosen last for each slot, ascending; -1 where there is none. They are positions
        even where the op translates its result to cache slots. Meant to be read: writing to it cannot change
        a result.

    Raises
    ------
    ValueError
        `slots` or `k` is no integer or out of range, `device` is none that torch can use, or `keep_indices`
        is no bool.

    Examples
    --------
    >>> state = TopkState(4, 2048)
    >>> state.slots, state.k, state.nbytes
    (4, 2048, 32832)
    """

    def __init__(
        self,
        slots: int,
        k: int,
        device: torch.device | str = "cpu",
        *,
        keep_indices: bool = True,
    ) -> None:
        checks = Checks(NAME)
        slots, k = checks.integer("slots", slots, 1, MAX_ROWS), checks.integer("k", k, 1, MAX_WIDTH)
        device = checks.device("device", device)
        self.k: int | None = k
        self.words = torch.full((slots, STATE_FLOATS), STATE_UNKNOWN, dtype=torch.float32, device=device)
        self.indices: Tensor | None = None
        if checks.flag("keep_indices", keep_indices):
            self.indices = torch.full((slots, k), -1, dtype=torch.int32, device=device)

    @classmethod
    def of(cls, words: Tensor, indices: Tensor | None = None, k: int | None = None) -> TopkState:
        """Wrap tensors that exist already, such as one layer of a larger buffer.

        Parameters
        ----------
        words : Tensor, ``[slots, 4]``, float32, contiguous, at an address that is a multiple of 16
        indices : Tensor, ``[slots, k]``, int32, same device, optional
        k : int, optional
            Items per row; default: the columns of `indices`. Without `indices` it is not needed: predictions
            serve any number of items.

        Returns
        -------
        TopkState
            It shares memory with both tensors.

        Raises
        ------
        ValueError
            An argument is no tensor, or its device, dtype, shape, strides or address are wrong, or `k` is not
            the number of columns of `indices`.
        """
        checks = Checks(f"{NAME}.of")
        checks.tensor("words", words, words, torch.float32, (None, STATE_FLOATS))
        checks.states("words", words)
        if k is not None:
            k = checks.integer("k", k, 1, MAX_WIDTH)
        if indices is not None:
            checks.tensor("indices", indices, words, torch.int32, (words.shape[0], k))
            k = indices.shape[1]
        state = cls.__new__(cls)
        state.words, state.indices, state.k = words, indices, k
        return state

    def __repr__(self) -> str:
        kept = "" if self.indices is not None else ", keep_indices=False"
        return f"TopkState({self.slots}, {self.k}, {str(self.words.device)!r}{kept})"

    @property
    def slots(self) -> int:
        """Requests that can have a state at once."""
        return self.words.shape[0]

    @property
    def nbytes(self) -> int:
        """Device memory in bytes."""
        return self.words.nbytes + (0 if self.indices is None else self.indices.nbytes)

    def accept(self, next_state: Tensor, slots: Tensor, accepted: Tensor) -> None:
        """Copy the state of each request's last accepted draft row into its slot; enqueued, without a sync.

        Kept positions do not change, because `next_state` holds none.

        Parameters
        ----------
        next_state : Tensor, ``[requests * next_n, 4]``, float32
            `next_state` of the op. A row that was too short to leave a state does not change the slot.
        slots : Tensor, ``[requests]``, integer, same device
            Slot of each request; a negative or too large number means no slot. No slot may occur twice.
        accepted : Tensor, ``[requests]``, integer, same device
            Accepted rows of each request, 1 to ``next_n``; other numbers count as the nearest of these.

        Raises
        ------
        ValueError
            An argument is no tensor, or its device, dtype or shape does not fit the others.
        """
        accept_rows(Checks(f"{NAME}.accept"), self.words, next_state, slots, accepted)

    def reset(self, slots: int | Sequence[int] | Tensor | None = None) -> None:
        """Clear slots, as for a new request; enqueued on the current stream.

        Parameters
        ----------
        slots : int, sequence of int, or Tensor, ``[m]``, integer, optional
            Slots to clear; default all of them. A tensor is on the state's device and is not read on the
            host: a negative or too large number in it means no slot.

        Raises
        ------
        ValueError
            A slot given as a number does not exist, or `slots` is none of these types.
        """
        cleared: list[tuple[Tensor, float]] = [(self.words, STATE_UNKNOWN)]
        if self.indices is not None:
            cleared.append((self.indices, -1))
        fill_chosen(Checks(f"{NAME}.reset"), "slots", slots, cleared)
