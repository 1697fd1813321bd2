"""Many curvatures into one: rules, what they lose, and what may not be merged."""
