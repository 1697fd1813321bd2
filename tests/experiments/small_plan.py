"""A plan that runs in seconds."""

from __future__ import annotations

TEXT = """\
name: small
model: {name: tiny, head: prototypes}
tasks: [faces, weaves]
curvature: {examples: 8, batch_size: 8}
training: {steps: 3, batch_size: 8}
arms:
  without: {penalty: none}
  kfac: {penalty: kronecker, strength: 3}
evaluation:
  examples: 20
  alphas: 0,1
  negation: {control: faces, alphas: "0,1"}
  disentanglement: {alphas: "0,1", examples: 5}
  localisation: {examples: 5}
  drift: {examples: 4, layer_examples: 0}
  spectra: true
"""
