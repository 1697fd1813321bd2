"""The stages of a plan, one file for each kind of work."""
