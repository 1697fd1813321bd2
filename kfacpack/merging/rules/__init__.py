"""The rules, one file each."""

from kfacpack.merging.rules.base import Combination, Rule, Terms
from kfacpack.merging.rules.optimal import Optimal
from kfacpack.merging.rules.shards import Shards
from kfacpack.merging.rules.stack import Stack
from kfacpack.merging.rules.tak import Tak

RULES: dict[str, type[Rule]] = {
    each.name: each
    for each in (
        Tak,
        Stack,
        Optimal,
        Shards,
    )
}

__all__ = ["RULES", "Combination", "Rule", "Terms"]
