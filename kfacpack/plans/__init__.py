"""A whole comparison in one file: what is estimated, merged, trained, added and measured, and in which order."""
