"""From the results of a run to one page that a person reads."""
