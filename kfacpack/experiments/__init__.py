"""Experiments: plans, the stages that carry them out, their results, figures and the HTML report."""
