"""Merging of curvatures: merge rules, approximation error, compatibility checks and subtraction."""
