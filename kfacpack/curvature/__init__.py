"""What a block of curvature is, how a matrix may be held, and the algebra on them."""
