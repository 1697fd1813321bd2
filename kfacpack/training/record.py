"""What a run says of itself: to be taken up again, and in the file of the vector that it makes."""

from __future__ import annotations

from dataclasses import asdict
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from kfacpack.bundle.manifest import Source
from kfacpack.curvature.matrices.components import raw_bytes
from kfacpack.models.fingerprint import fingerprint
from kfacpack.vectors.manifest import AboutVector, TaskEntry, Training
from kfacpack.vectors.vector import TaskVector

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from kfacpack.bundle.manifest import Base
    from kfacpack.heads import Head
    from kfacpack.training.job import Job


def request_of(job: Job, base: Base) -> dict[str, Any]:
    """What must be the same for a run to be taken up again."""
    model, others = job.regime.model, job.drift.splits if job.drift else {}
    settings = _settings(job)
    settings.pop("output_scale", None)  # it follows from the bundles or the data
    return {
        **settings,
        "regime": job.regime.name,
        "model": f"{base.family} {base.name}",
        "weights": base.sha256,
        "preprocessing": model.preprocessing,
        "task": job.task.name,
        "data": f"{job.split.source.dataset}, {len(job.split)} examples",
        "data_content": fingerprint(model, job.split, job.task.name, labels=True),
        "reg_data_content": {name: fingerprint(model, split, name) for name, split in others.items()},
        "head": f"{job.head.origin}, {_digest_of(job.head)}",
        "bundles": list(job.regularizer.digests) if job.regularizer else [],
    }


def vector_of(job: Job, tau: Mapping[str, Tensor], base: Base) -> TaskVector:
    """The vector, with its head and with how it was trained."""
    origin, model = job.split.source, job.regime.model
    source = Source(
        task=job.task.name,
        dataset=origin.dataset,
        revision=origin.revision,
        split=origin.split,
        license=origin.license,
        preprocessing=model.preprocessing,
        examples=len(job.split),
        dataset_size=len(job.split),
    )
    settings = _settings(job)
    training = Training(
        seed=settings.pop("seed"),
        settings={key: value for key, value in settings.items() if value is not None},
        bundles=job.regularizer.digests if job.regularizer else (),
    )
    about = AboutVector(
        base=base,
        function=model.function,
        regime=job.regime.name,
        tasks=(TaskEntry(source=source, training=training),),
    )
    return TaskVector({name: each.cpu() for name, each in tau.items()}, about, {job.task.name: job.head})


def _settings(job: Job) -> dict[str, Any]:
    """Every number that decides what is trained."""
    penalty = job.regularizer or job.drift
    autocast = {"autocast": str(job.autocast).removeprefix("torch.")} if job.autocast else {}
    return {
        **asdict(job.settings),
        "steps": job.steps,
        "lr": job.lr,
        **(penalty.settings if penalty else {}),
        **autocast,
    }


def _digest_of(head: Head) -> str:
    digest = sha256(repr(head.classes).encode())
    for tensor in (head.weight, head.bias):
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()
