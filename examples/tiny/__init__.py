"""The pretraining data of `tiny`: pictures drawn by code, and captions that describe them."""
