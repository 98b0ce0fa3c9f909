"""Compile one wanted binary and read off what it needs: no GPU, no driver."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright import gpu as gpus
from tilewright.matrix.machine_code import unwritten
from tilewright.matrix.reach import Wanted, compiler
from tilewright.toolkit.recording import Request

TENSOR_CORES = re.compile(r"\b(wgmma|mma\.sync|tcgen05\.mma|wmma)")


@dataclass(frozen=True)
class Built:
    """What one binary needs, and what is wrong with it, if anything."""

    key: str
    op: str
    backend: str
    kernel: str
    dtype: str
    sm: int
    case: str
    choice: str  # the launch choice, as text
    compiler: str
    registers: int = 0
    spills: int = 0  # bytes
    shared: int = 0  # bytes, static and dynamic
    violation: str = ""


def facts_of(wanted: Wanted) -> dict[str, Any]:
    """Return what is known of a binary before it is compiled."""
    request = wanted.request
    choice = ", ".join(f"{k}={v}" for k, v in (*request.constants, *request.options))
    return {
        "key": wanted.key,
        "op": wanted.op,
        "backend": wanted.backend,
        "kernel": wanted.kernel,
        "dtype": wanted.dtype,
        "sm": wanted.sm,
        "case": wanted.case,
        "choice": choice if request.technology != "cuda" else request.kernel,
        "compiler": compiler(request.technology),
    }


def build(wanted: Wanted) -> Built:
    """Compile and judge; a compiler's exception is a violation, not a crash."""
    request, facts = wanted.request, facts_of(wanted)
    try:
        compile_one = _cuda if request.technology == "cuda" else _triton
        registers, spills, shared, text, faults = compile_one(request, wanted.sm)
    except Exception as e:
        return Built(**facts, violation=f"does not compile: {type(e).__name__}: {str(e)[:300]}")
    limit = gpus.arch_of(wanted.sm).shared_per_block
    violation = ""
    if shared > limit:
        violation = f"shared memory {shared} exceeds the {limit} bytes of SM {wanted.sm}"
    elif spills > wanted.may_spill:
        violation = f"spills {spills} bytes"
    elif wanted.tensor_cores and not TENSOR_CORES.search(text):
        violation = "no tensor-core instruction, though the declaration promises one"
    elif faults:
        violation = f"reads what a path leaves unwritten: {faults[0]}"
    return Built(**facts, registers=registers, spills=spills, shared=shared, violation=violation)


Facts = tuple[int, int, int, str, list[str]]  # registers, spills, shared, text, faults


def _cuda(request: Request, sm: int) -> Facts:
    from tilewright.toolkit import nvrtc

    built = nvrtc.compile(request.source, request.kernel, sm, request.options)
    return (
        built.registers,
        built.spill_bytes,
        built.static_shared + request.dynamic_shared,
        built.log,
        [],
    )


def _triton(request: Request, sm: int) -> Facts:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel = request.kernel
    target = GPUTarget("cuda", sm, 32)
    backend = make_backend(target)
    # Triton's own binder, so that arguments are specialised exactly as a launch would
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    keywords = {**dict(request.constants), **dict(request.options), "debug": False}
    bound, specialization, options = binder(*request.arguments, **keywords)
    options, signature, constants, attributes = kernel._pack_args(
        backend, keywords, bound, specialization, options
    )
    source_class: Any = ASTSource
    if request.technology == "gluon":
        from triton.experimental.gluon._runtime import GluonASTSource

        source_class = GluonASTSource
    source = source_class(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=target, options=options.__dict__)
    registers, stack = _usage(compiled.asm["cubin"])
    faults = []
    if request.technology == "gluon":  # elsewhere it was never seen
        faults = unwritten(_read(compiled.asm["cubin"], "nvdisasm", "-c"))
    # A stack below the register cap is the frame of a call (a correctly rounded division makes
    # one); the assembler spills only when a thread may have no more registers.
    cap = min(options.maxnreg or 255, 255, 65536 // (32 * compiled.metadata.num_warps))
    spills = stack if registers > cap - 8 else 0
    return registers, spills, compiled.metadata.shared, compiled.asm["ptx"], faults


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack as the bundled cuobjdump reports them."""
    text = _read(cubin, "cuobjdump", "-res-usage")
    registers = max(int(n) for n in re.findall(r"REG:(\d+)", text))
    stack = max(int(n) for n in re.findall(r"STACK:(\d+)", text))
    local = max(int(n) for n in re.findall(r"LOCAL:(\d+)", text))
    return registers, max(stack, local)


def _read(cubin: bytes, tool: str, option: str) -> str:
    """What one of the tools that Triton brings along says of a binary."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
        command = [str(program), option, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
