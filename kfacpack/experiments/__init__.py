"""Experiments: plans, the stages of a run, results, figures and the HTML report."""
