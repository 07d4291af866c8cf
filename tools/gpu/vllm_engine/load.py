"""Serves a model under a mixed load: python load.py JOB.json RESULT.json MODELS [--minutes 10] [--url http://127.0.0.1:8000]

run.py starts it for jobs of kinds load and server (jobs.py). Both start `vllm serve`; with --url, they use a running server.

Kind load has a KV cache that is too small for the load, so vLLM preempts. Generates greedily for each prompt alone (the quiet run), then
for minutes with random arrivals, lengths and cancellations (the load), then some alone again. Greedy tokens of a prompt must be those of
its quiet run, up to a tie. Writes wrong tokens, memory over time, and requests and cache in use at the end.

Kind server sends engine.py's prompts all at once, twice, and writes what engine.py writes. It streams half of the answers.
Then it sends the first prompts as chats."""

import argparse
import asyncio
import contextlib
import json
import math
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import psutil

#: Number of the model's tokens, number of prompts, and the most tokens that a request generates.
VOCABULARY, PROMPTS, NEW_TOKENS = 4096, 48, 96
#: An arrival is one request, or with BURST_PROBABILITY as many as BURST. CANCELLED and SAMPLED (at temperature 0.8, not greedy) are
#: fractions of the requests.
ARRIVALS_PER_S, BURST, BURST_PROBABILITY, CANCELLED, SAMPLED = 6.0, 64, 0.05, 0.3, 0.1
#: Largest difference of log-probabilities, in nats, that rounding explains. compare.py measures it between vLLM's own backends.
TIE = 0.05
#: Tokens of a step whose log-probabilities are kept: more than two can tie.
RANKED = 5
#: The first prompts of kind server, which are short, are chats, too.
CHATS = 8


def texts() -> list[list[int]]:
    """Returns prompts of 5 to 2,500 tokens. Half of them begin with the same 512."""
    rng = random.Random(11)
    common = [rng.randrange(3, VOCABULARY) for _ in range(512)]
    lengths = [int(5 * 500 ** rng.random()) for _ in range(PROMPTS)]
    found = [[rng.randrange(3, VOCABULARY) for _ in range(n)] for n in lengths]
    return [common + text[: max(1, len(text) - 512)] if i % 2 else text for i, text in enumerate(found)]


class Client:
    """Requests to a server, and what came back."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self.session, self.url, self.model = session, url, model

    async def choices(self, path: str, body: dict, stream: bool) -> AsyncIterator[dict]:
        """Yields an empty choice, then the choice in each event of the answer to a request."""
        body = {"model": self.model, "ignore_eos": True, "return_token_ids": True, "stream": stream, **body}
        async with self.session.post(f"{self.url}/v1/{path}", json=body) as response:
            response.raise_for_status()
            yield {}  # the request runs: the caller may cancel it before its first token
            if not stream:
                yield (await response.json())["choices"][0]
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        yield choice

    async def complete(
        self, prompt: list[int], new: int = NEW_TOKENS, stop_after: int | None = None, temperature: float = 0.0, stream: bool = True
    ):
        """Returns the tokens of a completion, and of each step the RANKED best tokens with their log-probabilities, the best first.

        Closes the connection after `stop_after` tokens, which cancels the request; None: never."""
        body = {"prompt": prompt, "max_tokens": new, "temperature": temperature, "logprobs": RANKED, "return_tokens_as_token_ids": True}
        tokens, best = [], []
        async with contextlib.aclosing(self.choices("completions", body, stream)) as choices:
            async for choice in choices:
                tokens += choice.get("token_ids") or []
                for step in (choice.get("logprobs") or {}).get("top_logprobs") or []:
                    ranked = sorted(step.items(), key=lambda item: -item[1])
                    best.append([(int(name.removeprefix("token_id:")), value) for name, value in ranked])
                if stop_after is not None and len(tokens) >= stop_after:
                    break
        return tokens, best

    async def chat(self, prompt: list[int], new: int, stream: bool) -> tuple[list[int], str]:
        """Returns the tokens and the text of a greedy answer to a chat whose template adds nothing to its one message."""
        messages = [{"role": "user", "content": " ".join(f"t{token}" for token in prompt)}]
        tokens, text = [], ""
        async for choice in self.choices("chat/completions", {"messages": messages, "max_tokens": new, "temperature": 0}, stream):
            tokens += choice.get("token_ids") or []
            text += (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        return tokens, text

    async def metrics(self) -> dict[str, float]:
        """Returns the server's counters by name, without vLLM's prefix."""
        async with self.session.get(f"{self.url}/metrics") as response:
            lines = re.findall(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", await response.text(), re.MULTILINE)
        return {name: float(value) for name, value in lines}


class Checker:
    """Compares completions with those of the quiet run, and counts."""

    def __init__(self, quiet: list) -> None:
        self.quiet = quiet  # of each prompt what Client.complete() returned in the quiet run
        self.compared = self.requests = self.ties = 0  # numbers; compared: of tokens
        self.largest_gap = self.largest_noise = 0.0  # nats
        self.wrong: list[str] = []

    def check(self, i: int, tokens: list[int], best: list) -> None:
        """Compares tokens with the first of the quiet run's, until they part. They may part where the quiet run's step had a tie."""
        expected, ranked = self.quiet[i]  # ranked[at]: (token, log-probability) of step `at`, the best first
        self.requests += 1
        for at, (token, want) in enumerate(zip(tokens, expected)):
            if token != want:
                gap = ranked[at][0][1] - dict(ranked[at]).get(token, -math.inf)
                if gap > TIE:
                    self.wrong.append(f"prompt {i}, token {at}: got {token}, expected {want}, gap {gap:.4f}")
                else:
                    self.ties, self.largest_gap = self.ties + 1, max(self.largest_gap, gap)
                return
            self.compared += 1
            if at < len(best):
                self.largest_noise = max(self.largest_noise, abs(best[at][0][1] - ranked[at][0][1]))


def memory(root: int) -> tuple[float, float]:
    """Returns MB (10^6 bytes) of host memory and of GPU memory (0: unknown) of a process and its children."""
    pids, host = set(), 0.0
    with contextlib.suppress(psutil.NoSuchProcess):  # the server ended: load() reports its requests' errors
        for process in (psutil.Process(root), *psutil.Process(root).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # a child ended since it was listed
                host += process.memory_info().rss / 1e6
                pids.add(process.pid)
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        rows = []
    pairs = [row.split(",") for row in rows if re.fullmatch(r"\d+, \d+", row)]
    return host, sum(int(used) * 2**20 / 1e6 for pid, used in pairs if int(pid) in pids)  # nvidia-smi prints MiB


class Memory(NamedTuple):
    """MB of memory in use, `seconds` after the load began. gpu_mb is 0 if unknown."""

    seconds: float
    host_mb: float
    gpu_mb: float


async def load(client: Client, checker: Checker, prompts: list, seconds: float, server: int | None) -> dict:
    """Sends requests at random times for the given seconds, and waits for all. Returns counts, errors and the server's memory over time.

    server: its process id; None (--url): memory is not sampled."""
    rng, pending, begin = random.Random(13), set(), time.time()
    counts = {"sent": 0, "cancelled": 0, "sampled": 0}
    samples: list[Memory] = []
    errors: list[str] = []

    async def one(i, new, stop_after, temperature):
        try:
            tokens, best = await client.complete(prompts[i], new, stop_after, temperature)
            if temperature == 0:
                checker.check(i, tokens, best)
                if stop_after is None and len(tokens) != new:
                    checker.wrong.append(f"prompt {i}: got {len(tokens)} tokens, expected {new}")
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            errors.append(repr(error))

    while time.time() - begin < seconds:
        for _ in range(BURST if rng.random() < BURST_PROBABILITY else 1):
            cancelled, sampled = rng.random() < CANCELLED, rng.random() < SAMPLED
            new = rng.randrange(1, NEW_TOKENS + 1)
            prompt, stop_after = rng.randrange(len(prompts)), rng.randrange(new) if cancelled else None
            task = asyncio.create_task(one(prompt, new, stop_after, temperature=0.8 if sampled else 0.0))
            pending.add(task)
            task.add_done_callback(pending.discard)
            for name, value in (("sent", 1), ("cancelled", cancelled), ("sampled", sampled)):
                counts[name] += value
        if server and (not samples or time.time() - begin - samples[-1].seconds > 5):
            samples.append(Memory(time.time() - begin, *await asyncio.to_thread(memory, server)))
        await asyncio.sleep(rng.expovariate(ARRIVALS_PER_S))
    await asyncio.gather(*pending)
    return {**counts, "errors": errors, "memory": samples}


def growth(samples: list[Memory]) -> dict[str, float]:
    """Returns the MB by which memory grew in the last third. Before, PyTorch's allocator grows with the largest batches so far."""
    if not samples:
        return {"host_mb": 0.0, "gpu_mb": 0.0}
    first, last = samples[len(samples) * 2 // 3], samples[-1]
    return {"host_mb": last.host_mb - first.host_mb, "gpu_mb": last.gpu_mb - first.gpu_mb}


async def generate(client: Client) -> dict:
    """Returns the result of kind server: rounds, as engine.py writes them, and what the chats' tokens showed."""
    from engine import prompts

    (inputs, new), rounds = prompts("mixed"), []  # prompts of many lengths, the number of new tokens
    for _ in range(2):
        begin, before = time.time(), await client.metrics()
        outputs = await asyncio.gather(*(client.complete(text, new, stream=i % 2 == 0) for i, text in enumerate(inputs)))
        after = await client.metrics()
        found = {"seconds": time.time() - begin, "tokens": [tokens for tokens, _ in outputs]}
        found["cached"] = int(after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"])
        found["logprobs"] = [[[value for _, value in step[:2]] for step in best] for _, best in outputs]
        rounds.append(found)
    checker = Checker(outputs)
    for i in range(CHATS):
        (tokens, text), (streamed, streamed_text) = [await client.chat(inputs[i], new, stream) for stream in (False, True)]
        checker.check(i, tokens, [])  # []: without log-probabilities
        checker.check(i, streamed, [])
        # check() compares no token beyond the shorter of two
        if not text or not len(tokens) == len(streamed) == new or (tokens == streamed and text != streamed_text):
            counts = f"{len(tokens)} and {len(streamed)} tokens, expected {new} each"
            checker.wrong.append(f"chat {i}: got {text!r}, streamed {streamed_text!r}: {counts}")
    return {"rounds": rounds, "chat": {"compared": checker.compared, "wrong": checker.wrong}}


async def measure(options, job: dict, url: str, server: subprocess.Popen | None) -> dict:
    """Waits for the server. Returns the result of kind server (`generate`), or of kind load: runs quietly, under load, quietly again."""
    timeout = aiohttp.ClientTimeout(total=300)
    # the server closes idle connections, and a request that meets this is not sent again
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        begin = time.time()
        while True:
            try:
                async with session.get(f"{url}/v1/models") as response:
                    model = (await response.json())["data"][0]["id"]
                break
            except aiohttp.ClientError:
                if time.time() - begin > 240 or (server and server.poll() is not None):
                    raise
                await asyncio.sleep(0.5)
        result = {"start_s": time.time() - begin}
        client, prompts = Client(session, url, model), texts()
        if job["kind"] == "server":
            return result | await generate(client)
        checker = Checker([await client.complete(prompt) for prompt in prompts])
        result["quiet_s"] = time.time() - begin - result["start_s"]
        before = await client.metrics()
        result |= await load(client, checker, prompts, 60 * options.minutes, server.pid if server else None)
        after = await client.metrics()
        # a cancellation reaches the engine after its connection closes, and the gauges with the next step: a request makes one
        for _ in range(20):
            await client.complete(prompts[0], 2)
            idle = await client.metrics()
            if not idle["num_requests_running"] + idle["num_requests_waiting"] + idle["kv_cache_usage_perc"]:
                break
            await asyncio.sleep(0.5)
        result["left"] = {name: idle[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}
        result["counters"] = {n: after[n] - before[n] for n in after if n.endswith("_total") and after[n] != before.get(n)}
        for i in range(0, PROMPTS, 4):  # some prompts alone again
            checker.check(i, *await client.complete(prompts[i]))
    result["growth"] = growth(result["memory"])
    return result | {key: value for key, value in vars(checker).items() if key != "quiet"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("job", "result", "models"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--url", default="", help="a running server (default: start one)")
    options = parser.parse_args()
    job, server, url = json.loads(options.job.read_text()), None, options.url
    if not url:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(options.models / job["model"]), "--port", port]
        command += ["--attention-backend", job["backend"], "--dtype", "half", "--max-model-len", "4096", "--max-num-seqs", "64"]
        # 0.05: the share of the GPU that must be free at the start; small, because engines share the GPU
        command += ["--kv-cache-memory-bytes", str(job["cache_bytes"]), "--gpu-memory-utilization", "0.05"]
        command += ["--enable-prompt-tokens-details", "--chat-template", "{{ messages[0]['content'] }}", *job.get("serve", [])]
        server = subprocess.Popen(command)
    try:
        result = asyncio.run(measure(options, job, url, server))
    finally:
        if server:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
    options.result.write_text(json.dumps({"name": job["name"], **result}))


if __name__ == "__main__":
    main()
