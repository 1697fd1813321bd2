"""Records the operations of a step of a linearised model, and replays them without the model.

The Python code of the model, the dispatch mode and autograd execute the same few thousand operations in every step,
with different values. `Recorder` is a dispatch mode that records these operations while they run: those of the forward
pass, of its tangent and of the backward pass. `Recorder.program` converts them to two Python functions without
branches. `forward` takes the tangents and the batch, and returns f, J τ and the values that `backward` needs;
`backward` takes these values and u, and returns gradients. Both delete every value after its last use.

On a CPU, the same operations on the same values give bitwise identical results, so replayed and untraced steps agree.

A recording is valid for other batches of the same shapes only if the operations depend on the batch through tensors
alone. `Recorder` therefore refuses steps that read values from a tensor, draw random numbers, write to parameters,
buffers or the batch, or use tensors that are neither in the batch nor attributes of a module. There is one exception,
because transformers checks whether a mask contains padding: Boolean tensors that are computed from the batch and from
buffers may be read, and may select rows. These tensors are the conditions of a program. Before each replay, the
conditions are computed, and the program is replayed only if each of them has as many true elements as in the recorded
call. If the values of the batch are also available on the CPU, the conditions are computed there, without waiting for
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from kfacpack._torch import (
    DispatchMode,
    attention_operators,
    below_autograd,
    bound_arguments,
    callable_of,
    is_mutating,
    is_number_read,
    memory_address,
    written_arguments,
)
from kfacpack.errors import KfacpackError
from kfacpack.models.functional import reads_reported, true_positions

if TYPE_CHECKING:
    from collections.abc import Iterator

aten = torch.ops.aten

_LITERALS = (int, bool, str, type(None))
_EXACT = frozenset((
    "_to_copy", "_unsafe_view", "add", "alias", "all", "amax", "amin", "any", "arange", "bitwise_and", "bitwise_not",
    "bitwise_or", "cat", "clamp", "clone", "cumsum", "eq", "expand", "full", "ge", "gt", "index", "le", "logical_and",
    "logical_not", "logical_or", "lt", "masked_fill", "mul", "ne", "ones", "permute", "select", "slice", "squeeze",
    "sub", "sum", "t", "transpose", "unsqueeze", "view", "where", "zeros",
))  # fmt: skip
"""Operations whose integer results are the same on every device. Other operations may break ties differently."""


class Operation(NamedTuple):
    """One recorded call as source code. The values in a program are identified by numbers."""

    text: str
    """The call, such as `o3(v1, v2, (4, 8))`."""
    reads: tuple[int, ...]
    """Numbers of the values that the call reads."""
    writes: tuple[int, ...]
    """Numbers of the values that the call modifies."""
    results: tuple[int, ...]
    """Numbers of the values that the call returns."""
    target: str
    """Left-hand side of the assignment of the results, such as `v4 = `."""


class Recorder(DispatchMode):
    """Dispatch mode that records all operations that run inside it.

    Each tensor is assigned a value number. Only weak references to the results of operations are stored, so that the
    recorder does not keep them alive.

    Args:
        inputs: Tensors that differ between calls: the tangents and the batch.
        state: Tensors of the model. The program reads the same tensors in every call.
    """

    def __init__(self, inputs: Sequence[Tensor], state: Iterable[Tensor]) -> None:
        super().__init__()
        self._numbers = WeakTensorKeyDictionary()
        self._roots: list[int] = []
        self._memory: dict[int, int] = {}
        self._available = {id(tensor): tensor for tensor in state}
        self._names: dict[Any, str] = {}
        self._protected: set[int] = set()
        self.refusal: str | None = None
        """Reason why the operations cannot be replayed; None if they can."""
        self.constants: dict[str, Any] = {}
        """Operators and other objects that the source code refers to, by name."""
        self.operations: list[Operation] = []
        """Operations in the order in which they ran."""
        self.forward_length = 0
        """Number of operations of the forward pass."""
        self.outputs: tuple[int | None, int | None] = (None, None)
        """Value numbers of f and J τ."""
        self.state: dict[int, Tensor] = {}
        """Tensors of the model that were used, by value number."""
        self.seed = -1
        """Value number of u; -1 before the backward pass."""
        self.conditions: dict[int, int] = {}
        """Number of true elements in each Boolean tensor on which the operations depend, by value number."""
        self.inexact: set[int] = set()
        """Value numbers of results that may differ on another device."""
        self.inputs = [self._add_input(tensor) for tensor in inputs]
        """Value numbers of the tangents and of the tensors of the batch."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager that records the operations of the enclosed code."""
        with reads_reported(self.refuse), self:
            yield

    def refuse(self, reason: str) -> None:
        """Marks the step as one that cannot be replayed, for the given reason."""
        if self.refusal is None:
            self.refusal = reason

    def end_forward(self, f: Tensor, change: Tensor | None) -> None:
        """Marks the end of the forward pass; the operations that follow belong to the backward pass.

        Args:
            f: Output of the model.
            change: Tangent of f; None for zero.
        """
        self.forward_length = len(self.operations)
        self.outputs = (self.number(f), self.number(change))
        if self.outputs[0] is None or (self.outputs[1] is None and change is not None):
            self.refuse("f or J τ was not computed by a recorded operation")

    def number(self, tensor: Tensor | None) -> int | None:
        """Returns the value number of a tensor; returns None if the tensor is None or was not recorded."""
        if tensor is None:
            return None
        known: int | None = self._numbers.get(tensor)
        if known is None and id(tensor) in self._available:
            known = self._new_number(tensor)
            self.state[known] = tensor
            self._protected.add(self._roots[known])
        return known

    def root(self, number: int) -> int:
        """Returns the value number of the first value that shares memory with the value `number`."""
        return self._roots[number]

    def _add_input(self, tensor: Tensor) -> int:
        number = self._new_number(tensor)
        self._protected.add(self._roots[number])
        return number

    def begin_backward(self, u: Tensor) -> None:
        """Marks the beginning of the backward pass, and adds its input u."""
        self.seed = self._add_input(u)

    def _new_number(self, tensor: Tensor, sources: Iterable[int] = ()) -> int:
        """Assigns a number to a new value, and sets its root, which is the first value with the same memory."""
        number = len(self._roots)
        self._numbers[tensor] = number
        if tensor.is_floating_point() or tensor.is_complex():
            self.inexact.add(number)
        pointer = memory_address(tensor)
        self._memory[number] = pointer
        root = next((self._roots[source] for source in sources if pointer and self._memory[source] == pointer), number)
        self._roots.append(root)
        return number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.refusal is not None:
            return func(*args, **kwargs)
        if func is aten.detach.default and (number := self.number(args[0])) is not None:
            out = func(*args)
            self._numbers[out] = number  # the same value: memory and shape are shared
            return out
        if func is aten.lift_fresh.default:
            # `lift_fresh` returns a tensor that was created from Python numbers.
            args = (self._constant_tensor(args[0]),)
            func = aten.clone.default
        if func is aten.nonzero.default and args[0].dim() == 1 and self._add_conditions(func, args):
            count = self.conditions[cast("int", self.number(args[0]))]
            with self:
                return true_positions(args[0], count)[:, None]
        if not self._add_conditions(func, args) and (reason := _reason_against(func, args, kwargs)) is not None:
            self.refuse(reason)
            return func(*args, **kwargs)
        reads: list[int] = []
        parts = [self._render(value, reads) for value in args]
        parts += [f"{name}={self._render(value, reads)}" for name, value in kwargs.items()]
        writes = self._written(func, args, kwargs) if is_mutating(func) else ()
        out = func(*args, **kwargs)
        if self.refusal is None:
            self._add(func, ", ".join(parts), reads, writes, out)
        return out

    def _add_conditions(self, func: Any, args: Any) -> bool:
        """Adds the conditions under which an operation can be replayed although it depends on the values of tensors.

        Returns:
            True if the operation can be replayed under these conditions; False if it cannot, or needs no conditions.
        """
        if func is aten.index.Tensor:
            masks = [index for index in args[1] if index is not None and index.dtype not in (torch.int64, torch.int32)]
        elif is_number_read(func) or func is aten.nonzero.default:
            masks = [args[0]]
        else:
            return False
        numbers = [number for mask in masks if mask.dtype is torch.bool and (number := self.number(mask)) is not None]
        if len(numbers) < len(masks) or (masks and self.seed >= 0):
            return False
        self.conditions.update((number, int(mask.count_nonzero())) for number, mask in zip(numbers, masks, strict=True))
        return True

    def _add(self, func: Any, arguments: str, reads: Sequence[int], writes: tuple[int, ...], out: Any) -> None:
        text = f"{self._constant(func, 'o')}({arguments})"
        if writes:
            self.inexact.update(writes)
            self.operations.append(Operation(text, tuple(reads), writes, (), ""))
            return
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        tensors = [item for item in outs if isinstance(item, Tensor)]
        if all(self._numbers.get(tensor) is not None for tensor in tensors):
            # A conversion that returns its argument, or a query of a shape; its result is the same for every batch.
            return
        if any(self._numbers.get(tensor) is not None for tensor in tensors):
            self.refuse("an operation returns one of its arguments")
            return
        results = tuple(self._new_number(tensor, reads) for tensor in tensors)
        if func.overloadpacket.__name__ not in _EXACT:
            self.inexact.update(results)
        names = iter(results)
        target = ", ".join(f"v{next(names)}" if isinstance(item, Tensor) else "_" for item in outs)
        target = target if isinstance(out, Tensor) else f"[{target}]"
        self.operations.append(Operation(text, tuple(reads), writes, results, f"{target} = "))

    def _written(self, func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
        """Returns the numbers of the values that a mutating operation modifies."""
        numbers = []
        for tensor in written_arguments(func, args, kwargs):
            number = self.number(tensor)
            if number is None or self._roots[number] in self._protected:
                self.refuse(f"{func} writes to the batch, or to a tensor of the model")
                return ()
            numbers.append(number)
        return tuple(numbers)

    def _render(self, value: Any, reads: list[int]) -> str:
        """Returns the source code of an argument, and adds the value numbers of its tensors to `reads`."""
        if isinstance(value, Tensor):
            number = self.number(value)
            if number is None:
                self.refuse("the model uses a tensor that is neither in the batch nor an attribute of a module")
                return "None"
            reads.append(number)
            return f"{'s' if number in self.state else 'v'}{number}"
        if isinstance(value, (list, tuple)):
            return f"({''.join(f'{self._render(item, reads)}, ' for item in value)})"
        return repr(value) if isinstance(value, _LITERALS) else self._constant(value, "c")

    def _constant(self, value: Any, prefix: str) -> str:
        """Returns the name by which the program's source code refers to a constant."""
        key = (type(value), repr(value) if isinstance(value, float) else value)
        if key not in self._names:
            self._names[key] = f"{prefix}{len(self.constants)}"
            self.constants[self._names[key]] = value
        return self._names[key]

    def _constant_tensor(self, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        self._available[id(copy)] = copy
        return copy

    def program(self, gradients: Mapping[str, Tensor], *, compiled: bool) -> Program | None:
        """Returns the recorded step as a program, or None if the step cannot be replayed.

        Args:
            gradients: Results of the backward pass, by parameter. Empty if there was no backward pass.
            compiled: Whether torch.compile compiles the program.
        """
        numbers = {name: number for name, tensor in gradients.items() if (number := self.number(tensor)) is not None}
        if len(numbers) < len(gradients):
            self.refuse("a gradient was not computed by a recorded operation")
        learned = {number for number, tensor in self.state.items() if isinstance(tensor, nn.Parameter)}
        operations = _needed(self.operations[: self.forward_length], self.conditions, self.root)
        if not learned.isdisjoint(self.conditions.keys() | {n for operation in operations for n in operation.reads}):
            self.refuse("the model reads a value that depends on its parameters")
        return Program(self, numbers, compiled=compiled) if self.refusal is None else None


def _reason_against(func: Any, args: Any, kwargs: Any) -> str | None:
    """Returns the reason why a program cannot contain an operation; None if it can."""
    tags = func.tags
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return f"{func} depends on the values of a tensor"
    if torch.Tag.inplace_view in tags:
        return f"{func} changes the shape of a tensor in place"
    if torch.Tag.nondeterministic_seeded in tags:
        attention = func in attention_operators()
        if not attention or bound_arguments(func, args, kwargs).get("dropout_p"):
            return f"{func} draws random numbers"
    return None


class Program:
    """A recorded step, as two functions; see the docstring of the module.

    Args:
        recorder: Recorder of the step.
        gradients: Value numbers of the recorded gradients, by parameter.
        compiled: Whether torch.compile compiles both functions.
    """

    def __init__(self, recorder: Recorder, gradients: Mapping[str, int], *, compiled: bool) -> None:
        self._recorder = recorder
        self._compiled = compiled
        self._gradients = gradients
        self._backwards: dict[tuple[str, ...], Callable[..., Any]] = {}
        self.conditions = tuple(recorder.conditions.values())
        """Numbers of true elements for which the program is valid; see `Recorder.conditions`."""
        self._conditioned = self._inputs_of_conditions()
        self._count = {on_cpu: self._define_count(on_cpu=on_cpu) for on_cpu in (False, True)}
        state = recorder.state
        backward = _needed(recorder.operations[recorder.forward_length :], set(gradients.values()), recorder.root)
        used = {number for operation in backward for number in operation.reads} | set(gradients.values())
        created = {number for operation in backward for number in operation.results}
        self._saved = sorted(used - created - {recorder.seed} - state.keys())
        self.state = tuple(state.values())
        """Tensors of the model that the program reads."""
        self.watched = [state[number] for number in sorted(used & state.keys())]
        """Tensors of the model that `backward` reads."""
        self._forward = self._define_forward(self._saved)
        if gradients:
            self._backwards[tuple(gradients)] = self._define_backward(tuple(gradients))

    def _name(self, number: int) -> str:
        return f"{'s' if number in self._recorder.state else 'v'}{number}"

    def _context(self) -> AbstractContextManager[None]:
        return below_autograd(bypass=not self._compiled)

    def conditions_for(self, inputs: Sequence[Tensor], copies: Sequence[Tensor | None]) -> tuple[int, ...]:
        """Counts the true elements of the condition tensors for given inputs, for a comparison with `conditions`.

        Args:
            inputs: See `forward`. The list is not changed.
            copies: Copies of the inputs on the CPU; None for inputs without a copy. If all inputs that the conditions
                depend on have a copy, the counts are not read from the device.
        """
        if not self.conditions:
            return ()
        on_cpu = self._conditioned is not None and all(copies[index] is not None for index in self._conditioned)
        with self._context():
            masks = self._count[on_cpu](list(copies if on_cpu else inputs), self.state)
            return tuple(torch.stack([mask.count_nonzero() for mask in masks]).tolist())

    def forward(self, inputs: list[Tensor]) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Computes f and J τ.

        Args:
            inputs: Tangents and tensors of the batch, in the order of the recorded call. The list may be cleared.

        Returns:
            f, J τ (None for zero), and the values for `backward`.
        """
        with self._context():
            results: tuple[Tensor, Tensor | None, list[Tensor]] = self._forward(inputs, self.state)
        return results

    def outputs(self, inputs: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Computes f and J τ without the values for `backward`, which saves memory. May clear `inputs`."""
        with self._context():
            f, change, _ = self._define_forward([])(inputs, self.state)
        return f, change

    def backward(self, saved: list[Tensor], u: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Computes the gradients with respect to the named parameters. May clear `saved`."""
        selected = tuple(name for name in names if name in self._gradients)
        if selected not in self._backwards:
            self._backwards[selected] = self._define_backward(selected)
        with self._context():
            return dict(zip(selected, self._backwards[selected](saved, self.state, u), strict=True))

    def _condition_operations(self) -> list[Operation]:
        recorder = self._recorder
        return _needed(recorder.operations[: recorder.forward_length], recorder.conditions, recorder.root)

    def _inputs_of_conditions(self) -> list[int] | None:
        """Returns the indices of the inputs that the conditions depend on.

        Returns None if the conditions cannot be computed on the CPU, because they depend on the state of the model or
        on values that may differ on the CPU.
        """
        recorder, operations = self._recorder, self._condition_operations()
        used = {*recorder.conditions, *(number for operation in operations for number in operation.reads)}
        if not used.isdisjoint(recorder.inexact | recorder.state.keys()):
            return None
        return [index for index, number in enumerate(recorder.inputs) if number in used]

    def _define_count(self, *, on_cpu: bool) -> Callable[..., Any]:
        recorder, outputs = self._recorder, list(self._recorder.conditions)
        lines = _body(self._condition_operations(), {*outputs, *recorder.state}, recorder.inputs)
        lines.append(f"return ({''.join(f'{self._name(number)}, ' for number in outputs)})")
        return self._define("conditions", "inputs", recorder.inputs, lines, on_cpu=on_cpu)

    def _define_forward(self, saved: Sequence[int]) -> Callable[..., Any]:
        recorder = self._recorder
        kept = {*saved, *(number for number in recorder.outputs if number is not None)}
        operations = _needed(recorder.operations[: recorder.forward_length], kept, recorder.root)
        lines = _body(operations, {*kept, *recorder.state}, recorder.inputs)
        f, change = (None if number is None else self._name(number) for number in recorder.outputs)
        lines.append(f"return {f}, {change}, [{', '.join(map(self._name, saved))}]")
        return self._define("forward", "inputs", recorder.inputs, lines)

    def _define_backward(self, names: Sequence[str]) -> Callable[..., Any]:
        recorder = self._recorder
        outputs = [self._gradients[name] for name in names]
        operations = _needed(recorder.operations[recorder.forward_length :], set(outputs), recorder.root)
        lines = _body(operations, {*outputs, *recorder.state}, [*self._saved, recorder.seed])
        lines.append(f"return ({''.join(f'{self._name(number)}, ' for number in outputs)})")
        return self._define("backward", "saved", self._saved, lines, f"v{recorder.seed}")

    def _define(
        self, name: str, values: str, numbers: Sequence[int], lines: Iterable[str], *extra: str, on_cpu: bool = False
    ) -> Callable[..., Any]:
        """Defines a function of a list of values (which it may clear), the state of the model, and other arguments."""
        state = [self._name(number) for number in self._recorder.state]
        body = [
            f"[{', '.join(self._name(number) for number in numbers)}] = {values}",
            *([] if self._compiled else [f"{values}.clear()"]),
            f"[{', '.join(state)}] = state",
            *lines,
        ]
        source = f"def {name}({', '.join((values, 'state', *extra))}):\n" + "".join(f"    {line}\n" for line in body)
        constants = self._recorder.constants
        if on_cpu:
            constants = {key: torch.device("cpu") if isinstance(c, torch.device) else c for key, c in constants.items()}
        namespace = dict(constants) if self._compiled else {key: callable_of(constants[key]) for key in constants}
        exec(compile(source, f"<kfacpack {name}>", "exec"), namespace)
        function: Callable[..., Any] = namespace[name]
        is_compiled = self._compiled and name != "conditions"
        return _compiled(function, self.state[0].device) if is_compiled else function


def _compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Compiles a function for fixed shapes, with CUDA graphs on a GPU.

    The memory of CUDA graphs is reused by their next replay. Results are therefore copied, except for the values that
    one step passes from the forward to the backward pass.
    """
    graphs = device.type == "cuda"
    compiled = torch.compile(function, fullgraph=True, dynamic=False, mode="reduce-overhead" if graphs else None)

    def call(*args: Any) -> Any:
        if graphs and function.__name__ == "forward":
            torch.compiler.cudagraph_mark_step_begin()
        try:
            results = compiled(*args)
        except Exception as error:  # the exceptions of compiler backends have no common base class
            reason = " ".join(str(error).split()[:40])
            remedy = "omit --compile (or compile=True), or install a C++ compiler that torch.compile can find"
            raise KfacpackError(f"torch.compile cannot compile the linearised step: {reason}; {remedy}") from error
        if not graphs:
            return results
        return tuple(result.clone() if isinstance(result, Tensor) else result for result in results)

    return call


def _needed(operations: Sequence[Operation], outputs: Iterable[int], root: Callable[[int], int]) -> list[Operation]:
    """Returns those operations on which the outputs depend."""
    values, memory = set(outputs), {root(number) for number in outputs}
    needed = []
    for operation in reversed(operations):
        written = any(root(number) in memory for number in operation.writes)
        if written or not values.isdisjoint(operation.results):
            needed.append(operation)
            values.update(operation.reads)
            memory.update(map(root, operation.reads))
    return needed[::-1]


def _body(operations: Sequence[Operation], kept: Iterable[int], inputs: Iterable[int]) -> list[str]:
    """Returns operations as lines of source code. Values that are not in `kept` are deleted after their last use."""
    remaining = {*inputs, *(number for operation in operations for number in operation.results)} - set(kept)
    lines = []
    for operation in reversed(operations):
        last = sorted(remaining.intersection((*operation.reads, *operation.results)))
        remaining.difference_update(last)
        if last:
            lines.append(f"del {', '.join(f'v{number}' for number in last)}")
        lines.append(operation.target + operation.text)
    if remaining:
        lines.append(f"del {', '.join(f'v{number}' for number in sorted(remaining))}")
    return lines[::-1]
