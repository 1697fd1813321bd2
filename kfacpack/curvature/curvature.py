"""The curvature of a task: diagonal blocks of the generalised Gauss-Newton matrix of f at the base parameters.

This module also identifies base models, loads bundles as curvatures, and checks the matrices of a bundle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from kfacpack.curvature.blocks import STRUCTURES, CurvatureBlock
from kfacpack.curvature.matrices import FORMS
from kfacpack.curvature.matrices.components import BundleTensors, raw_bytes, spec_of
from kfacpack.curvature.matrices.matrix import negative_eigenvalue_bound
from kfacpack.curvature.saving import PretrainedMixin, digest_of, save
from kfacpack.errors import KfacpackError, TaskVectorError, did_you_mean
from kfacpack.format.identity import describe
from kfacpack.format.manifest import Base, base_digest, first_problem
from kfacpack.format.reader import Bundle, CheckFailure, CheckResult, run_check
from kfacpack.format.schema import coverage_problem

if TYPE_CHECKING:
    import os

    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.identity import WeightReader
    from kfacpack.format.manifest import About
    from kfacpack.format.reader import CheckProgress
    from kfacpack.format.units import OnProgress


def covered_parameters(
    tau: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], owner: str
) -> dict[str, Tensor]:
    """Selects the parameters of a task vector that a curvature or another object covers, and checks their values.

    Args:
        tau: Changes to parameters, by name.
        shapes: Shapes of all covered parameters, by name.
        owner: Name of the object that covers the parameters, such as "curvature", for error messages.

    Returns:
        The covered part of `tau`.

    Raises:
        TaskVectorError: If `tau` contains none of the covered parameters, or if the value of one of them is not a
            floating-point tensor of the expected shape.
    """
    _require_mapping(tau)
    covered = {name: tau[name] for name in tau if name in shapes}
    if not covered:
        first_names = ", ".join(list(shapes)[:3])
        problem = f"the task vector contains none of the parameters that this {owner} covers, such as {first_names}"
        raise TaskVectorError(f"{problem}; check that the task vector and the {owner} belong to the same model")
    check_task_vector(covered, shapes, owner)
    return covered


def check_task_vector(tau: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], owner: str) -> None:
    """Checks that a task vector contains only covered parameters, and that their dtypes and shapes are valid.

    Args:
        tau: Changes to parameters, by name.
        shapes: Shapes of all covered parameters, by name.
        owner: Variable name of the object that covers the parameters, such as "curvature", for error messages.

    Raises:
        TaskVectorError: If the task vector is empty, a parameter is not covered, or a value is not a floating-point
            tensor of the parameter's shape.
    """
    _require_mapping(tau)
    if not tau:
        raise TaskVectorError(f"the task vector is empty; expected at least one parameter of {owner}.parameters")
    for name, tensor in tau.items():
        if not isinstance(tensor, Tensor):
            raise TaskVectorError(f"parameter {name!r}: expected a tensor, got {type(tensor).__name__}")
        if name not in shapes:
            raise TaskVectorError(
                f"parameter {name!r} is not in {owner}.parameters{did_you_mean(name, shapes)} "
                "To drop all parameters that are not covered, use "
                f"{{name: value for name, value in tau.items() if name in {owner}.parameters}}"
            )
        if tuple(tensor.shape) != shapes[name] or not tensor.is_floating_point():
            actual = f"{tensor.dtype} of shape {list(tensor.shape)}"
            expected = f"a floating-point tensor of shape {list(shapes[name])}"
            raise TaskVectorError(f"parameter {name!r}: expected {expected}, got {actual}")


def _require_mapping(tau: object) -> None:
    if not isinstance(tau, Mapping):
        raise TaskVectorError(f"expected a task vector (a mapping of names to tensors), got {type(tau).__name__}")


def identify(
    model: nn.Module | Mapping[str, Tensor],
    parameters: Collection[str],
    *,
    family: str,
    name: str,
    revision: str | None = None,
) -> Base:
    """Creates a description of a base model θ0 from the digests of its parameters.

    Args:
        model: A module or a state dict.
        parameters: Names of the parameters to include.
        family: Model family, such as "open_clip".
        name: Name of the model in its family.
        revision: Version of the weights, if known.

    Returns:
        The identity of the model, with its parameters in state-dict order.

    Raises:
        KfacpackError: If a parameter is missing, or the manifest format does not allow one of the values.

    Example:
        >>> import torch
        >>> import kfacpack as kp
        >>> kp.identify(torch.nn.Linear(2, 1), ["weight", "bias"], family="custom", name="line").parameters[0].shape
        (1, 2)
    """
    state = _state_dict(model)
    if missing := [parameter for parameter in parameters if parameter not in state]:
        raise KfacpackError(f"parameter {missing[0]!r} is not in the model's state dict")
    included = set(parameters)
    try:
        described = tuple(
            describe(parameter, *spec_of(tensor), raw_bytes(tensor))
            for parameter, tensor in state.items()
            if parameter in included
        )
        digest = base_digest(described)
        return Base(family=family, name=name, revision=revision, sha256=digest, parameters=described)
    except ValidationError as error:
        keys, problem = first_problem(error)
        raise KfacpackError(f"invalid description of the base model: {'.'.join(map(str, keys))}: {problem}") from error


def weights_of_model(model: nn.Module | Mapping[str, Tensor]) -> WeightReader:
    """Returns a function that reads the parameters of a module or state dict, for comparison with a bundle."""
    state = _state_dict(model)

    def read(name: str) -> tuple[str, tuple[int, ...], memoryview] | None:
        return None if name not in state else (*spec_of(state[name]), raw_bytes(state[name]))

    return read


def _state_dict(model: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if isinstance(model, nn.Module):
        return model.state_dict()
    if not isinstance(model, Mapping):
        hint = "; if the model is from kp.load_model, pass model.module" if hasattr(model, "module") else ""
        raise KfacpackError(f"expected an nn.Module or a state dict, got {type(model).__name__}{hint}")
    return model


class Curvature(PretrainedMixin):
    """The curvature of a task: a block-diagonal matrix G over the parameters of a model.

    A curvature that was loaded from a file reads its tensors when they are used.

    Args:
        blocks: The blocks, which together cover every parameter of `about.base` exactly once.
        about: Metadata of the curvature, such as the base model, the function f and the task.
        bundle: The bundle from which the curvature was loaded, if any.

    Raises:
        KfacpackError: If the blocks do not cover every parameter exactly once, or a matrix does not match the shape of
            its block.

    Example:
        >>> import torch
        >>> import kfacpack as kp
        >>> model = torch.nn.Linear(4, 3)
        >>> curvature = kp.estimate(model, [torch.randn(8, 4)])
        >>> tau = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
        >>> curvature.quadratic(tau).shape
        torch.Size([])
        >>> list(curvature.apply(tau))
        ['weight', 'bias']
    """

    def __init__(self, blocks: Iterable[CurvatureBlock], about: About, *, bundle: Bundle | None = None):
        self.blocks = tuple(blocks)
        self.about = about
        self.bundle = bundle
        """The bundle from which the curvature was loaded, or None."""
        self._shapes = {parameter.name: parameter.shape for parameter in about.base.parameters}
        if problem := coverage_problem(self.blocks, self._shapes):
            raise KfacpackError(": ".join(problem))
        for block in self.blocks:
            rows, columns = block.join.rows, block.join.columns
            if shape_problem := block.structure.shape_problem(rows, columns):
                raise KfacpackError(f"block {block.name!r} of {rows}×{columns}: {shape_problem}")

    def __repr__(self) -> str:
        task = f" on {self.about.source.task}" if self.about.source else ""
        size = f"blocks={len(self.blocks)}, parameters={len(self.parameters)}, nbytes={self.nbytes}"
        return f"<Curvature of {self.about.base.name}{task}: {size}>"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the covered parameters, in state-dict order."""
        return tuple(self._shapes)

    @property
    def nbytes(self) -> int:
        """Size of the matrices in their current form, in bytes.

        A matrix that several blocks share counts once. Copies that `to` keeps on a device are not included.
        """
        return sum(matrix.nbytes for matrix in self._matrices().values())

    @cached_property
    def digest(self) -> str:
        """Digest of the bundle from which the curvature was loaded, or of the file that `save` would write.

        If the curvature was not loaded from a bundle, all values are computed and hashed on first access.
        """
        return self.bundle.digest if self.bundle else digest_of(self)

    def quadratic(self, tau: Mapping[str, Tensor]) -> Tensor:
        """Computes <τ, G τ>, summed over all blocks. The result is differentiable with respect to τ.

        Args:
            tau: Task vector, {state-dict name: tensor of the parameter's shape}. Missing parameters count as zero.

        Returns:
            A 0-d tensor, in at least float32.

        Raises:
            TaskVectorError: If `tau` is empty, or one of its parameters is not covered or has the wrong shape.
        """
        return torch.stack([block.quadratic(tau, self._shapes) for block in self._blocks_for(tau)]).sum()

    def apply(self, tau: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Computes the product G τ of the curvature and a task vector τ.

        Args:
            tau: Task vector, {state-dict name: tensor of the parameter's shape}. Missing parameters count as zero.

        Returns:
            G τ by parameter name, in state-dict order. The result contains all parameters of every block that covers a
            parameter of `tau`. All other blocks, for which G τ is zero, are left out. Each parameter of `tau` keeps its
            dtype. The results for all other parameters are in at least float32.

        Raises:
            TaskVectorError: If `tau` is empty, or one of its parameters is not covered or has the wrong shape.
        """
        product: dict[str, Tensor] = {}
        for block in self._blocks_for(tau):
            for name, value in block.apply(tau, self._shapes).items():
                product[name] = product[name] + value if name in product else value
        order = (name for name in self._shapes if name in product)
        return {name: product[name].to(tau[name].dtype) if name in tau else product[name] for name in order}

    def to(self, device: str | torch.device, dtype: torch.dtype = torch.float32) -> Curvature:
        """Returns the same curvature with its matrices unpacked and kept on a device.

        Repeated calls to `apply` and `quadratic` then do not read, unpack or copy matrices. The unpacked matrices are
        used only for task vectors on this device whose products are computed in `dtype`. `save`, `digest` and `about`
        are not affected, because the new curvature also keeps the matrices in their stored form.

        Args:
            device: Device of the task vectors.
            dtype: float32 for task vectors in float32 or a narrower dtype, float64 for task vectors in float64.

        Returns:
            A new curvature; this one is not changed.

        Raises:
            KfacpackError: If `dtype` is neither float32 nor float64.
            CorruptTensor: If a tensor of the bundle is damaged.

        Example:
            >>> import torch
            >>> import kfacpack as kp
            >>> curvature = kp.estimate(torch.nn.Linear(4, 3), [torch.randn(8, 4)]).to("cpu")
            >>> for step in range(3):
            ...     value = curvature.quadratic({"weight": torch.randn(3, 4)})
        """
        if dtype not in (torch.float32, torch.float64):
            raise KfacpackError(f"expected dtype torch.float32 or torch.float64, got {dtype}")
        target = torch.device(device)
        resident = {key: matrix.resident(dtype, target) for key, matrix in self._matrices().items()}
        blocks = (
            replace(block, structure=block.structure.map_matrices(lambda matrix: resident[id(matrix)]))
            for block in self.blocks
        )
        return Curvature(blocks, self.about, bundle=self.bundle)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        pack: bool = True,
        max_shard_size: int | str | None = None,
        on_progress: OnProgress = lambda done, total: None,
    ) -> None:
        """Atomically saves the curvature as a bundle.

        Args:
            path: File to write, by convention `*.kfac`. If the name ends in `.kfac.index.json`, the bundle is divided
                into several files, which are written to the same folder as this index.
            pack: Whether dense symmetric matrices are stored as lower triangles.
            max_shard_size: Maximum size of each file of a divided bundle, such as `"2GB"`. Defaults to 5 GB. A file may
                exceed this size if it contains a single block, or several blocks that share a matrix or a parameter.
            on_progress: Called with the number of matrices written and the total number.

        Raises:
            BundleError: If a value is not finite, or the file cannot be written.
        """
        save(self, path, pack=pack, max_shard_size=max_shard_size, on_progress=on_progress)

    def _matrices(self) -> dict[int, Matrix]:
        """Returns all matrices by their ids. A matrix that several blocks share occurs once."""
        return {id(matrix): matrix for block in self.blocks for _, matrix in block.structure.matrices()}

    def _blocks_for(self, tau: Mapping[str, Tensor]) -> list[CurvatureBlock]:
        """Checks τ and returns the blocks that cover at least one of its parameters."""
        check_task_vector(tau, self._shapes, "curvature")
        return [block for block in self.blocks if any(name in tau for name in block.parameters)]


def load(path: str | os.PathLike[str]) -> Curvature:
    """Loads a curvature from a bundle.

    Only the header is read immediately. Tensors are memory-mapped, and are read and checked when they are used.

    Args:
        path: A `.kfac` file, the index of a bundle in several files (`*.kfac.index.json`), or
            `hf://owner/repo@revision/file`.

    Returns:
        The curvature.

    Raises:
        BundleError: If the file is not a valid bundle.
        HubError: If a file on the Hub cannot be read.

    Example:
        >>> import kfacpack as kp
        >>> curvature = kp.load("mnist.kfac")  # doctest: +SKIP
        >>> curvature.about.source.task  # doctest: +SKIP
        'mnist'
    """
    return from_bundle(Bundle(path))


def from_bundle(bundle: Bundle) -> Curvature:
    """Returns the curvature that an open bundle contains. Its tensors are read when they are used."""
    matrices = {name: matrix_of(bundle, name) for name in bundle.matrices}
    blocks = (
        CurvatureBlock(
            entry.name,
            entry.operation,
            entry.join,
            STRUCTURES[entry.structure].from_entry(entry, matrices),
            entry.losses,
        )
        for entry in bundle.manifest.blocks
    )
    return Curvature(blocks, bundle.manifest.about(), bundle=bundle)


def matrix_of(bundle: Bundle, name: str) -> Matrix:
    """Returns one matrix of an open bundle. Its tensors are read when they are used."""
    entry = bundle.matrices[name]
    components = BundleTensors(bundle, entry.components)
    return FORMS[entry.form](entry.side, components, psd=entry.psd, examples=entry.examples, positions=entry.positions)


def check_form(bundle: Bundle, on_progress: CheckProgress) -> CheckResult:
    """Checks that the values of each matrix meet the requirements of its form, such as symmetry.

    Args:
        bundle: The bundle to check.
        on_progress: Called with the name of the check, the number of matrices checked and the total number.

    Returns:
        The number of matrices checked, and the failures.
    """

    def failure(name: str) -> CheckFailure | None:
        if violation := matrix_of(bundle, name).violation():
            component, problem = violation
            return CheckFailure(f"tensor {bundle.matrices[name].components[component]!r}", problem)
        return None

    return run_check("symmetry", bundle.matrices, failure, on_progress)


def check_psd(bundle: Bundle, on_progress: CheckProgress) -> CheckResult:
    """Checks that every matrix declared to be positive semi-definite is positive semi-definite up to rounding errors.

    Args:
        bundle: The bundle to check.
        on_progress: Called with the name of the check, the number of matrices checked and the total number.

    Returns:
        The number of matrices checked, the failures, and the number of matrices that were not checked because they are
        not declared to be positive semi-definite.
    """

    def failure(name: str) -> CheckFailure | None:
        if (bound := negative_eigenvalue_bound(matrix_of(bundle, name))) is None:
            return None
        tensor = bundle.matrices[name].components["data"]
        problem = f"it has an eigenvalue below {bound:.4g}, which rounding errors cannot explain"
        return CheckFailure(f"tensor {tensor!r}", f"is not positive semi-definite: {problem}")

    declared = [name for name, entry in bundle.matrices.items() if entry.psd]
    result = run_check("psd", declared, failure, on_progress)
    return replace(result, exempt=len(bundle.matrices) - len(declared))
