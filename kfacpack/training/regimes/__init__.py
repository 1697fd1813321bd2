"""What is trained, and through which model: the regimes, one file each."""

from kfacpack.training.regimes.attention import Attention
from kfacpack.training.regimes.base import Moved, Regime
from kfacpack.training.regimes.full import Full
from kfacpack.training.regimes.linear import Linear

REGIMES: dict[str, type[Regime]] = {
    each.name: each
    for each in (
        Linear,
        Full,
        Attention,
    )
}

__all__ = ["REGIMES", "Moved", "Regime"]
