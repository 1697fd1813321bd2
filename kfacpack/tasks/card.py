"""What a data set's card, README.md, says of its columns, where its parquet files do not say it themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

METADATA = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", re.DOTALL)


def declared_features(text: str, config: str | None) -> Any | None:
    """The columns' types under `dataset_info`, of a config where there are several; None without any."""
    import datasets
    import yaml

    found = METADATA.match(text)
    try:
        said = yaml.safe_load(found[1]) if found else None
        infos = said.get("dataset_info") if isinstance(said, Mapping) else None
        every = [infos] if isinstance(infos, Mapping) else infos or []
        named = {each.get("config_name", "default"): each for each in every}
        info = next(iter(named.values())) if len(named) == 1 else named.get(config or "default")
        features = info.get("features") if info else None
        return datasets.Features._from_yaml_list(features) if features else None
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError):
        return None  # a card is written for people: what is wrong there is no reason not to read the data
