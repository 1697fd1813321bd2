"""Numbers in words, the same wherever they are shown."""

from __future__ import annotations

NOTHING = "–"


def human_bytes(count: float) -> str:
    """1536 -> '1.5 kB', in powers of a thousand as disks and hubs count."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_seconds(seconds: float) -> str:
    """75.2 -> '1 min 15 s'."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def percent(share: float, std: float | None = None) -> str:
    """0.9312 -> '93.1 %'; with a deviation, '93.1 ± 0.4 %'."""
    return f"{100 * share:.1f} %" if std is None else f"{100 * share:.1f} ± {100 * std:.1f} %"


def plain(value: float, std: float | None = None) -> str:
    """Three digits that count."""
    return f"{value:.3g}" if std is None else f"{value:.3g} ± {std:.2g}"


def score(value: float, std: float | None = None) -> str:
    """Three decimals, for what lies between 0 and 1 and is no share."""
    return f"{value:.3f}" if std is None else f"{value:.3f} ± {std:.3f}"


def count(number: float) -> str:
    return f"{number:,.0f}"
