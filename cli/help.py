"""What `--help` says of a command, where typer's own words would mislead."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class PlainHelp:
    """A flag takes no value, so that none is named behind it."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in found:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return found


class Command(PlainHelp, TyperCommand):
    """Its usage has arguments as they are typed: their metavars, in brackets where they may be left out."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [each for each in self.get_params(ctx) if each.param_type_name == "argument"]
        named = [each.metavar if each.required else f"[{each.metavar}]" for each in arguments]
        return [self.options_metavar or "", *named]
