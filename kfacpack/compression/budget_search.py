"""Which option each family of matrices gets, so that all fit into so many bytes and lose least.

What counts is the error of `quadratic`, and that is not the same on all task vectors.

- Random ones, τ ~ N(0, I): E[(τᵀ (G − G') τ)²] = 2 ‖G − G'‖² + (tr(G − G'))². Low rank does badly: it drops eigenvalues
  of one sign, so that the lost trace adds up over the blocks.
- Those along the curvature, as training makes them, τ ~ N(0, G): E[τᵀ (G − G') τ] = <G − G', G>. Diagonal blocks do
  badly: seen from there, what is between them is most of the curvature.

So: on random τ, better than any single codec for all matrices, by some margin; then, along the curvature, as good as
any of them; each if it can be had. Of what is left, the least product of both errors. To get there, for an exchange
rate κ,

    2 ‖G − G'‖²  +  (tr(G − G'))²  +  κ |<G − G', G>|

is minimised, each in units of what G has. ‖G − G'‖², the trace and |<G − G', G>| are sums over blocks. Near a lost
trace μ its square grows by 2μ for each unit, so that, for a price λ of a byte, the share of a block is

    2 ‖G − G'‖²  +  2 μ tr(G − G')  +  κ |<G − G', G>|  +  λ · bytes.

That is minimised for falling λ, until the bytes are used up, with μ from the time before; for B and A of a block at
once, since the one is worth nothing without the other. Then changes of single blocks fill up what is left. Of the
results for many κ, and of the single codecs, the rule above takes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kfacpack.compression.candidates import Candidates
    from kfacpack.compression.chain import CodecChain

    FloatArray = NDArray[np.float64]


OptionIndices = tuple[int, ...]
"""For each family, which of its options."""

MARGIN = 0.8
"""The error on random τ is at most this share of the best single codec's, if that can be had."""
_RATES = tuple(float(rate) for rate in np.logspace(-9, 3, 13))
"""The κ that are tried."""
_ROUNDS, _PRICES, _SWEEPS = 4, 24, 6
"""How many μ and λ are tried, and how often one goes over all blocks at most."""


@dataclass(frozen=True)
class TotalError:
    """In units of what G has."""

    nbytes: int
    lost: float
    trace: float
    along: float

    @property
    def random(self) -> float:
        """The squared error on random τ."""
        return 2 * self.lost + self.trace**2

    @property
    def product(self) -> float:
        """Of the errors on random τ and along the curvature."""
        return float(self.random**0.5 * self.along)


class BudgetSearch:
    def __init__(self, menu: Candidates):
        self._bytes = [np.array([option.nbytes for option in family.options]) for family in menu.families]
        self._answers = [family.answers for family in menu.families]
        size, trace = (sum(float(table.moments[k].flatten()[0]) for table in menu.tables) for k in (0, 1))
        squared = 2 * size + trace**2
        units = [squared or 1.0, squared**0.5 or 1.0, size or 1.0]
        self._tables: list[tuple[tuple[int, ...], FloatArray]] = [
            (table.families, np.stack([m.numpy() / unit for m, unit in zip(table.moments[2:], units, strict=True)]))
            for table in menu.tables
        ]
        self._moves = [self._move(families) for families in dict.fromkeys(families for families, _ in self._tables)]

    def best(self, limit: int, single: Sequence[OptionIndices]) -> OptionIndices | None:
        """The best of what was found within `limit` bytes of matrices, and of the single codecs that fit anyway."""
        if self.total(self.smallest()).nbytes > limit:
            return None
        bar = MARGIN**2 * min((self.total(picks).random for picks in single), default=inf)
        within = [picks for picks in single if self.total(picks).nbytes <= limit]
        found = set(single)
        for rate in _RATES:
            start = min((*self._priced(limit, rate), *within), key=lambda picks: self._error(picks, rate))
            found.add(self._filled(start, limit, rate))
        totals = {picks: self.total(picks) for picks in sorted(found)}
        allowed = max(bar, min(total.random for total in totals.values()))
        along = min((self.total(picks).along for picks in single), default=inf)

        def rank(picks: OptionIndices) -> tuple[bool, float]:
            return totals[picks].along > along, totals[picks].product

        return min((picks for picks in totals if totals[picks].random <= allowed), key=rank)

    def single(self) -> dict[OptionIndices, CodecChain]:
        """One codec for all: the picks that it comes to."""
        found: dict[OptionIndices, CodecChain] = {}
        for chain in self._answers[0]:
            found.setdefault(tuple(answers[chain] for answers in self._answers), chain)
        return found

    def smallest(self) -> OptionIndices:
        return tuple(int(sizes.argmin()) for sizes in self._bytes)

    def untouched(self) -> OptionIndices:
        return (0,) * len(self._bytes)

    def total(self, picks: OptionIndices) -> TotalError:
        size = sum(int(sizes[pick]) for sizes, pick in zip(self._bytes, picks, strict=True))
        found = [losses[_at_index(tuple(picks[family] for family in families))] for families, losses in self._tables]
        return TotalError(size, *np.sum(found, axis=0).tolist())

    def _error(self, picks: OptionIndices, rate: float) -> float:
        total = self.total(picks)
        return float(_weighted(total.lost, total.trace, total.along, rate))

    def _priced(self, limit: int, rate: float) -> Iterator[OptionIndices]:
        mu = 0.0
        for _ in range(_ROUNDS):
            picks = self._affordable(limit, mu, rate)
            yield picks
            # Half-way, because what was avoided this time would be taken again the next time.
            mu = (mu + self.total(picks).trace) / 2

    def _affordable(self, limit: int, mu: float, rate: float) -> OptionIndices:
        """The least sum of all shares, at the smallest price of a byte at which it is within the limit."""
        picks = self.smallest()
        low, high = 1e-24, 1.0
        for _ in range(_PRICES):
            price = (low * high) ** 0.5
            found = self._at_price(picks, price, mu, rate)
            if self.total(found).nbytes <= limit:
                picks, high = found, price
            else:
                low = price
        return picks

    def _at_price(self, start: OptionIndices, price: float, mu: float, rate: float) -> OptionIndices:
        """One block after the other, until none has better options."""
        picks = list(start)
        for _ in range(_SWEEPS):
            before = tuple(picks)
            for move in self._moves:
                lost, trace, along = self._losses(move, picks)
                cost = 2 * lost + 2 * mu * trace + rate * along + price * move.nbytes
                move.take(int(cost.argmin()), picks)
            if tuple(picks) == before:
                break
        return tuple(picks)

    def _filled(self, start: OptionIndices, limit: int, rate: float) -> OptionIndices:
        """Changes of one block that lessen the error, the most for its bytes first, as long as they fit."""
        picks = list(start)
        while True:
            total = self.total(tuple(picks))
            now = _weighted(total.lost, total.trace, total.along, rate)
            best, change = 0.0, None
            for move in self._moves:
                losses, place = self._losses(move, picks), move.place(picks)
                others = np.array([total.lost, total.trace, total.along]) - losses[_at_index(place)]
                lost, trace, along = losses + others[:, None, None]
                error = _weighted(lost, trace, along, rate)
                more = move.nbytes - move.nbytes[place]
                gain = np.where(total.nbytes + more <= limit, (now - error) / np.maximum(more, 1), -inf)
                option = int(gain.argmax())
                # Rounding must not make it go round in circles.
                if gain.flat[option] > best and error.flat[option] < now * (1 - 1e-9):
                    best, change = float(gain.flat[option]), (move, option)
            if change is None:
                return tuple(picks)
            move, option = change
            move.take(option, picks)

    def _move(self, families: tuple[int, ...]) -> OptionChange:
        first, second = families[0], families[-1]
        tables = [table for table in self._tables if {first, second} & set(table[0])]
        if first == second:
            return OptionChange(first, None, self._bytes[first][:, None], tables)
        return OptionChange(first, second, self._bytes[first][:, None] + self._bytes[second], tables)

    def _losses(self, move: OptionChange, picks: list[int]) -> FloatArray:
        """What the blocks lose that a move touches, (3, first, second), by its options, the others as picked."""
        rows, columns = move.nbytes.shape
        free = {move.first: np.arange(rows)[:, None], move.second: np.arange(columns)}
        found = np.zeros((3, rows, columns))
        for families, losses in move.tables:
            shape = (3, rows if move.first in families else 1, columns if move.second in families else 1)
            found += losses[_at_index(tuple(free.get(each, picks[each]) for each in families))].reshape(shape)
        return found


@dataclass(frozen=True)
class OptionChange:
    """A change of the families on both sides of a block, or of the one that is on both, or of the only one."""

    first: int
    second: int | None
    nbytes: FloatArray
    """(options of the first, options of the second or 1)"""
    tables: Sequence[tuple[tuple[int, ...], FloatArray]]
    """Of all blocks that it touches."""

    def place(self, picks: Sequence[int]) -> tuple[int, int]:
        return picks[self.first], 0 if self.second is None else picks[self.second]

    def take(self, option: int, picks: list[int]) -> None:
        """Put an option, counted row by row, into `picks`."""
        row, column = divmod(option, self.nbytes.shape[1])
        picks[self.first] = row
        if self.second is not None:
            picks[self.second] = column


def _weighted(lost: Any, trace: Any, along: Any, rate: float) -> Any:
    """What is minimised, of numbers or of arrays of them."""
    return 2 * lost + trace**2 + rate * along


def _at_index(place: tuple[Any, ...]) -> tuple[Any, ...]:
    """All three losses, by the options on each side."""
    return (slice(None), *place)
