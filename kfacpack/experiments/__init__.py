"""Experiments: plans, the stages that execute them, their results, figures and the HTML report."""
