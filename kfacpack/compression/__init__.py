"""From a curvature to a smaller one: codecs, what they lose, and the choice of one for each matrix."""
