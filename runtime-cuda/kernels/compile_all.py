#!/usr/bin/env python3
"""Compiles every kernel of variants.txt with NVRTC, to machine code, and prints what ptxas says of registers and memory.

    python3 -m venv V && V/bin/pip install nvidia-cuda-nvrtc==13.0.88
    V/bin/python compile_all.py [--arch sm_90] [--verbose] [file.cu ..]
"""

import argparse
import ctypes
import glob
import itertools
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def variants(only):
    """Yields (file, defines) for every combination of the values in a line of the table."""
    for line in open(os.path.join(HERE, "variants.txt")):
        words = line.split("#")[0].split()
        if not words or (only and words[0] not in only):
            continue
        sets = [[(name, v) for v in values.split(",")] for name, values in (w.split("=") for w in words[1:])]
        for chosen in itertools.product(*sets):
            yield words[0], chosen


def text_of(name, seen):
    """A file with its own headers in place of their `#include` lines, each once."""
    if name in seen:
        return ""
    seen.add(name)
    lines = open(os.path.join(HERE, name)).read().split("\n")
    include = re.compile(r'#include "(.*)"')
    return "\n".join(text_of(m.group(1), seen) if (m := include.match(line)) else line for line in lines)


def library():
    roots = [p for p in sys.path if p.endswith("site-packages")]
    found = [f for r in roots for f in glob.glob(os.path.join(r, "nvidia/*/lib/libnvrtc.so.1[0-9]"))]
    if not found:
        return ctypes.CDLL("libnvrtc.so.13")
    # NVRTC opens its built-ins by name, which finds a library already loaded.
    for builtins in glob.glob(os.path.join(os.path.dirname(found[0]), "libnvrtc-builtins.so.1[0-9].[0-9]*")):
        ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(found[0])


def compile_one(nvrtc, source, name, arch):
    """Returns (succeeded, log)."""
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    options = [f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v"]
    code = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*[o.encode() for o in options]))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code == 0, log.value.decode()


def usage(log):
    """Per kernel: (name, registers, spilled bytes, shared bytes)."""
    name, spilled = None, 0
    for line in log.split("\n"):
        if m := re.search(r"Compiling entry function '(\w+)'", line):
            name = m.group(1)
        elif m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", line):
            spilled = int(m.group(1)) + int(m.group(2))
        elif name and (m := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            yield name, int(m.group(1)), spilled, int(shared.group(1)) if shared else 0
            name, spilled = None, 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append")
    parser.add_argument("--verbose", action="store_true", help="a line per kernel with registers, spills and static shared memory")
    parser.add_argument("files", nargs="*")
    args = parser.parse_args()
    nvrtc, count, failed = library(), 0, 0
    for file, defines in variants(args.files):
        source = "".join(f"#define {n} {v}\n" for n, v in defines) + text_of(file, set())
        label = f"{file} {' '.join(f'{n}={v}' for n, v in defines)}"
        for arch in args.arch or ["sm_80", "sm_90", "sm_100"]:
            ok, log = compile_one(nvrtc, source, file, arch)
            count += 1
            warnings = [line for line in log.split("\n") if "warning" in line or "error" in line]
            if not ok or warnings:
                failed += 1
                said = "\n".join(line for line in log.split("\n") if "ptxas" not in line)
                print(f"{label} {arch}: {'compiled with warnings' if ok else 'FAILED'}\n{said[:3000]}")
            for kernel, registers, stack, shared in usage(log):
                if args.verbose or stack:
                    print(f"{label} {arch} {kernel}: {registers} registers, {stack} bytes of stack and spills, {shared} bytes shared")
    print(f"{count} compilations, {failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
