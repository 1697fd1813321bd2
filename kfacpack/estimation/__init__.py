"""From a model and its inputs to curvature: which operation used which parameter, probes, sums, plans, resuming."""
