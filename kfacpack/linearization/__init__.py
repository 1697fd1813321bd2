"""The linearised model f(x) + J(x) τ, at little more than the cost of fine-tuning the model itself."""
