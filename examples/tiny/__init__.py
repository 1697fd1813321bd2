"""The pretraining data of `tiny`: images drawn by code, and captions that describe them."""
