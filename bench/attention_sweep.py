"""Sweeps constants of attention's plan over cases of the bench's suite, in one process.

  PYTHONPATH=proto:kernels:server:client:bench python att_sweep.py [--rounds 30] [--case NAME ...] [--variant "A=1;B=(2,3)" ...]

A variant sets names of deltaline_kernels.attention.plan; "general" takes the kernel for all attention, "base" what is
there. Without --variant those of VARIANTS for the case. One line for each: case, us, share of a copy, error, variant.
"""
import argparse
import contextlib

import torch

from deltaline_bench.attention.cases import SUITE
from deltaline_bench.ceilings import measure_ceilings
from deltaline_bench.cuda_timer import CudaTimer
from deltaline_bench.measurement import _check
from deltaline_bench.peers import Peers
from deltaline_bench.timer import time_in_turns
from deltaline_kernels.attention import launch, plan

SPLITS = [f"SPLITS=();MOST_KEYS={n}" for n in (256, 512, 1024, 2048, 4096)]
LATENT_SPLITS = [f"LATENT_SPLITS=();MOST_KEYS={n}" for n in (1024, 2048)]
COMBINES = [f"MANY={x}" for x in ("(256,8)", "(128,16)", "(128,32)", "(256,16)")]
FEWS = [f"FEW={x}" for x in ("(32,64)", "(64,64)", "(64,128)", "(128,64)")]
ONE, TWO, THREE = "LEAST_TILES=99", "LEAST_TILES=2", "SHORT_PROGRAMS=3"  # programs of a multiprocessor
LESS = "LEAST_TILES=99;SHARED_BYTES=163*1024"  # one program with four tiles of 256 beside 16 columns, three beside 64
WARPS = ["FEW_COLUMNS=64", "FEW_COLUMNS=8"]  # 4 warps whatever the columns; 8 for all of a program for itself
VARIANTS = {
    "verify-32x8192": ["general", "base", *WARPS[:1], TWO, *SPLITS[1:], COMBINES[0], COMBINES[1], f"{SPLITS[3]};{COMBINES[0]}",
                       f"{SPLITS[2]};{COMBINES[0]};{WARPS[0]}", LESS],
    "decode-32x8192": ["general", "base", ONE, *SPLITS[1:4], COMBINES[0], f"{SPLITS[3]};{COMBINES[0]}", f"{ONE};{SPLITS[3]};{COMBINES[0]}",
                       f"{ONE};{WARPS[1]}", LESS],
    "decode-1x32768": ["general", "base", ONE, *SPLITS[:3], f"{ONE};{SPLITS[1]}", *FEWS, *[f"{ONE};{SPLITS[1]};{few}" for few in FEWS],
                       f"{ONE};{WARPS[1]};{SPLITS[1]}"],
    "decode-1x32768-capped": ["general", "base", f"{ONE};{SPLITS[1]}"],
    "decode-32x8192-capped": ["general", "base", ONE],
    "decode-32x8192-32-8-128": ["general", "base", ONE, THREE, *SPLITS[1:4], COMBINES[0]],
    "decode-128x2048": ["general", "base", ONE, *SPLITS[2:4], f"{SPLITS[2]};{COMBINES[0]}"],
    "decode-ragged": ["general", "base", ONE, *SPLITS[:4], COMBINES[0]],
    "decode-16x131072-window": ["general", "base", ONE, *SPLITS[:4]],
    "latent-decode-32x8192": ["base", *LATENT_SPLITS],
    "latent-verify-32x8192": ["base"],
}


@contextlib.contextmanager
def applied(text):
    old, can = {}, launch.can_attend_short
    if text == "general":
        launch.can_attend_short = lambda *_: False
    elif text != "base":
        for part in text.split(";"):
            name, value = part.split("=", 1)
            old[name] = getattr(plan, name)
            setattr(plan, name, eval(value))
    try:
        yield
    finally:
        launch.can_attend_short = can
        for name, value in old.items():
            setattr(plan, name, value)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", action="append")
    parser.add_argument("--variant", action="append")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.no_grad():
        timer = CudaTimer()
        copy = measure_ceilings(timer, device, 20).copy_bytes_per_s
        print(f"copy {copy / 1e12:.3f} TB/s", flush=True)
        for name in options.case or VARIANTS:
            case = SUITE.cases[name](device, Peers(None))
            make = next(iter(case.ours.values()))
            runs, errors = {}, {}
            for text in options.variant or VARIANTS.get(name, ["general", "base"]):
                try:
                    with applied(text):
                        side = make()
                        prepared = timer.prepare(side.call)
                    errors[text] = _check(side, prepared, case.expected).relative
                    runs[text] = prepared.run
                except Exception as failure:
                    print(f"{name} failed: {text}: {type(failure).__name__}: {str(failure)[:150]}", flush=True)
            for text, taken in time_in_turns(timer, runs, options.rounds).items():
                us = taken.median_us
                wrong = "" if errors[text] <= case.max_error else "  WRONG"
                share = case.num_bytes / us * 1e6 / copy
                print(f"{name} {us:8.2f} us {share:.3f} err {errors[text]:.1e}{wrong}  {text}", flush=True)
            del case, runs, make
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
