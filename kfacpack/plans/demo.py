"""The plan of `kfacpack demo`, as a user would write it."""

from __future__ import annotations

from kfacpack.training.groups import STRENGTH

THREE = ("digits", "hebrew", "weaves")
EIGHT = ("digits", "mnist", "materials", "faces", "hebrew", "syllabics", "emblems", "weaves")

_TEXT = """\
# A comparison on the small CLIP that comes with kfacpack. Copy it, edit it, and: kfacpack run plan.yaml
name: demo
model: {{name: tiny, head: prototypes}}
tasks: [{tasks}]
seeds: [0]

curvature:            # of each task, from its own data
  examples: 256
training:             # of each task's vector, apart from the others
  steps: {steps}
  batch_size: 32

arms:                 # ways of training that are compared
  without: {{penalty: none}}
  kfac: {{penalty: kronecker, strength: {strength:g}}}

evaluation:
  methods: [sum]
  alphas: 0:2:0.1     # how much of the sum is added; 1 is as it is, untuned
  examples: 200
  negation: {{control: {control}, keep: 0.95}}
  disentanglement: {{examples: 100}}
  localisation: {{examples: 100}}
  drift: {{examples: 50, layer_examples: 4}}
  spectra: true
"""


def plan_text(*, every: bool = False) -> str:
    tasks = EIGHT if every else THREE
    return _TEXT.format(tasks=", ".join(tasks), control=tasks[0], steps=40, strength=STRENGTH)
