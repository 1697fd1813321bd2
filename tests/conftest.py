"""Timings on a shared machine say nothing, so no deadline; the same examples every time, so a failure comes back."""

from hypothesis import settings

settings.register_profile("here", deadline=None, max_examples=15, derandomize=True)
settings.load_profile("here")
