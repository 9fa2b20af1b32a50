"""How many instructions the fused kernels take for a pair of query and key, on a machine without a GPU.

Each kernel is compiled for Hopper with the tile of the table, taken apart with the disassembler that Triton brings, and
its innermost loop over products is counted. Fewer instructions are less time where the kernels wait for nothing else; a
bad schedule may spoil it, so that a GPU has the last word::

    python benchmarks/instructions.py --preset smgk --preset gaussian --head-dim 64
    python benchmarks/instructions.py --preset smgk --head-dim 32 --dropout 0.1 --listing query
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from fused_calls import passes_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from mgk.benchmark.plan import USUAL_PRESETS
from mgk.benchmark.shape import Shape
from mgk.ops.triton import launch, tuning

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
NAMES = {
    "attention_forward": "forward",
    "attention_forward_wide": "forward",
    "attention_backward_key_value": "key_value",
    "attention_backward_two_keys": "key_value",
    "attention_backward_query": "query",
}
Instruction = tuple[int, str]


def started(preset: str, shape: Shape, dropout_p: float) -> list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]:
    """What a call would start: kernel, arguments, constants and tile."""
    found = []

    def note(kernel: Any, programs: int, arguments: Any, constants: Any, kinds: Any, tile: Any) -> None:
        named = dict(zip(kernel.arg_names[len(arguments) :], constants, strict=True))
        if kernel.__name__ in NAMES and not named.get("UNFACTORED"):
            found.append((kernel, arguments, named, tile))

    vars(launch)["_start"] = note
    _, backward = passes_of(preset, shape, torch.device("cpu"), dropout_p)
    backward()
    return list({kernel.__name__: (kernel, *rest) for kernel, *rest in found}.values())


def compiled(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], tile: tuning.Tile) -> Any:
    """As it would be on the GPU, where tensors begin at multiples of 16 bytes."""
    signature: dict[str, str] = {}
    values, attributes = dict(constants), {}
    for position, (name, argument) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if argument is None:
            signature[name], values[name] = "constexpr", None
        elif isinstance(argument, torch.Tensor):
            signature[name] = f"*{TYPES[argument.dtype]}"
            if name not in kernel.do_not_specialize_on_alignment:
                attributes[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(argument, float):
            signature[name] = "fp32"
        elif isinstance(argument, int):
            signature[name] = "i32"
            if argument % 16 == 0 and name not in kernel.do_not_specialize:
                attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            shape = ",".join(map(str, argument.block_shape))
            layout = f",{launch.with_layout(argument).layout!r}" if kernel.is_gluon() else ""
            signature[name] = f"tensordesc<{TYPES[argument.base.dtype]}[{shape}]{layout}>"
    signature |= dict.fromkeys(constants, "constexpr")
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(kernel, {name: signature[name] for name in kernel.arg_names}, values, attributes)
    settings = {name: value for name, value in tile.settings().items() if value is not None}
    return triton.compile(source, target=TARGET, options=settings)


def disassembled(cubin: bytes) -> tuple[list[Instruction], int]:
    """Addresses and instructions, and registers of a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text, usage = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "-res-usage")
        )
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", text, re.MULTILINE)
    return [(int(address, 16), line) for address, line in lines], int(re.findall(r"REG:(\d+)", usage)[0])


def loops_of(instructions: list[Instruction]) -> list[list[str]]:
    """Loops with products that have no other in them, in the order in which they stand."""
    bodies = []
    for address, line in instructions:
        target = re.search(r"\bBRA\b.*\s0x([0-9a-f]+)", line)
        if target and int(target[1], 16) < address:
            body = [each for each in instructions if int(target[1], 16) <= each[0] <= address]
            # Whoever waits in vain is sent behind the end of the program, and back from there: that is no loop.
            if any("HGMMA" in each for _, each in body) and not any("EXIT" in each for _, each in body):
                bodies.append(body)
    inner = [a for a in bodies if not any(b is not a and a[0] <= b[0] and b[-1] <= a[-1] for b in bodies)]
    return [[re.sub(r"^@!?U?P\w+\s+", "", line) for _, line in body] for body in sorted(inner)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", action="append", choices=USUAL_PRESETS, help="again for more; default: smgk")
    parser.add_argument("--head-dim", type=int, action="append", help="again for more; default: 64")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--listing", choices=sorted(set(NAMES.values())), help="print the loop of one kernel as well")
    arguments = parser.parse_args()
    vars(tuning).update(_architecture=lambda index: "sm90", multiprocessors=lambda index: 132)
    for preset in arguments.preset or ["smgk"]:
        for head_dim in arguments.head_dim or [64]:
            shape = Shape(batch=2, heads=2, tokens=256, head_dim=head_dim, is_causal=arguments.causal)
            for kernel, given, constants, tile in started(preset, shape, arguments.dropout):
                instructions, registers = disassembled(compiled(kernel, given, constants, tile).asm["cubin"])
                # The first: blocks of which every pair is seen.
                loop = loops_of(instructions)[0]
                # With warp specialisation two groups of warps multiply.
                pairs = tile.rows * tile.columns / (32 * tile.warps * (1 + tile.specialised))
                spills = sum("STL" in line or "LDL" in line for line in loop)
                waits = sum("WARPGROUP.DEPBAR" in line for line in loop)
                products = sum("HGMMA" in line for line in loop)
                counts = Counter(line.split()[0].split(".")[0] for line in loop).most_common(14)
                print(
                    f"{preset}, head_dim {head_dim}, {NAMES[kernel.__name__]}: {len(loop) / pairs:.2f} a pair, "
                    f"{registers} registers, {spills} spills in the loop, {tuple(tile)}"
                    # For want of registers, which the compiler tells nobody.
                    + (", each product waits for the one before" if waits >= products else "")
                )
                print("   ", "  ".join(f"{name} {count / pairs:.2f}" for name, count in counts))
                if arguments.listing == NAMES[kernel.__name__]:
                    print("\n".join(loop))


if __name__ == "__main__":
    main()
