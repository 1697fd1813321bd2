"""A whole comparison in one file: what is estimated, merged, trained, added and measured, and in which order.

The stages of a plan, one file for each kind of work.

From the results of a run to one page that a person reads.
"""
