"""The linearised model f(x) + J(x) τ, which costs little more to train than the model itself."""
