"""The linearised model f(x) + J(x) τ, which needs little more memory to train than the model itself."""
