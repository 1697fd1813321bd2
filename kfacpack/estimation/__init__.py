"""From a model and its inputs to curvature: which operation used which parameter, probes, sums, plans, resuming.

What long work has in common: processes that share it, and files that it is taken up again from.
"""
