# SPDX-License-Identifier: Apache-2.0
"""A server with its stages on two machines, and speech from it: the tutorial of docs/scaling.md on one machine.

    python examples/online/two_hosts.py [MODEL] [--output speech.wav]

The machines are hosts made of Linux namespaces (needs root, and the extra `ray`): they share the CPU, but no network,
`/dev/shm` or `/tmp`. MODEL is one of Qwen3-Omni's kind (default: `shapes`).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from vllm_omni.testing.hosts import Hosts, RayNodes

TEXT = "A red circle is left of a blue square."
WAIT_AND_SPEAK = """
import sys, time, urllib.request
url, data = sys.argv[1:]
while True:
    try:
        urllib.request.urlopen(f"{url}/health")
        break
    except OSError:
        time.sleep(1)
request = urllib.request.Request(f"{url}/v1/audio/speech", data.encode(), {"Content-Type": "application/json"})
sys.stdout.buffer.write(urllib.request.urlopen(request).read())
"""
"""On the second machine: a client."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="shapes")
    parser.add_argument("--output", type=Path, default=Path("speech.wav"))
    args = parser.parse_args(arguments)
    if why_not := Hosts.why_not():
        sys.exit(f"hosts cannot be made here: {why_not}")
    shared = [folder for folder in (Path(__file__).parents[2], Path(args.model)) if folder.is_dir()]
    with Hosts(2, shared=shared) as opened:
        first, second = opened.hosts
        print(f"starting Ray on {first.address} and {second.address}")
        nodes = RayNodes(first)
        nodes.add(second)
        command = [str(Path(sys.executable).with_name("vllm")), "serve", args.model, "--omni"]
        command += ["--distributed-backend", "ray", "--host", first.address]
        for stage, host in (("thinker", first), ("talker", second), ("code2wav", second)):
            command += [f"--stage.{stage}.runtime.node", host.address]
        print(*command[1:])
        server = first.popen(command, nodes.env)
        request = json.dumps({"model": args.model, "input": TEXT, "voice": "ada", "response_format": "wav"})
        client = [sys.executable, "-c", WAIT_AND_SPEAK, f"http://{first.address}:8000", request]
        with args.output.open("wb") as file:
            speaking = second.popen(client, stdout=file)
            while speaking.poll() is None:
                if server.poll() is not None:
                    sys.exit(f"the server ended with {server.returncode}")
                try:
                    speaking.wait(1)
                except subprocess.TimeoutExpired:
                    continue
        server.terminate()
        server.wait()
    if speaking.returncode:
        sys.exit("the request failed")
    print(f"{TEXT!r} is in {args.output}")


if __name__ == "__main__":
    main()
